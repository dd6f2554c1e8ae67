"""The command line as a user meets it: exit codes, messages, JSON, no traceback, no network, quick to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from wavefill import __version__, cli, env
from wavefill.cli import _errors
from wavefill.spec import InvalidArgument, OutOfPages

runner = CliRunner()


def run(*arguments: str) -> Result:
    return runner.invoke(cli.app, list(arguments))


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300,
                          check=False, env={**os.environ, **variables})


def test_version() -> None:
    assert run("--version").output == f"wavefill {__version__}\n"


@pytest.mark.parametrize("arguments", [
    (), ("generate",), ("bench",), ("bench", "kernels"), ("bench", "overhead"), ("explain",), ("advise",), ("doctor",),
], ids=lambda a: "_".join(a) or "top")
def test_help_of_every_command(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize(("arguments", "words"), [
    (("generate", "--model", "no/such/folder"), ["error: --model: ", "smollm2", "no/such/folder", "save_pretrained"]),
    (("generate", "--compare", "flash"), ["--compare", "sdpa", "'flash'"]),
    (("generate", "--dtype", "int4"), ["--dtype", "float32, bfloat16, both", "'int4'"]),
    (("generate", "--prompt", "no-such-file.txt"), ["error: --prompt: ", "no-such-file.txt", "No such file"]),
    (("generate", "--seed", str(2**70)), ["--seed"]),
    (("bench", "kernels", "--rows", "llama9"), ["error: --rows: ", "llama8b-b1-1k", "'llama9'"]),
    (("bench", "kernels", "--schedules", "fastest"), ["--schedules", "stream_k", "'fastest'"]),
    (("bench", "kernels", "--rows", "llama8b-b1-1k", "--layout", "blocks"), ["--layout: ", "contiguous", "'blocks'"]),
    (("bench", "kernels", "--rows", "llama8b-b1-1k", "--dtype", "int8"), ["error: --dtype: ", "bfloat16", "'int8'"]),
    (("bench", "kernels", "--rows", ","), ["rows", "names with commas between", "an empty name"]),
    (("bench", "kernels", "--rows", "llama8b-b1-1k", "--page-size", "99999999999"), ["--page-size", "65536"]),
    (("bench", "kernels", "--threads", "1025"), ["--threads", "1024"]),
    (("bench", "overhead", "--threads", str(2**70)), ["--threads", "1024"]),
    (("generate", "--threads", str(2**31)), ["--threads", "1024"]),
    (("explain",), ["--lens"]),
    (("explain", "--lens", "4", "--html", "/dev/null/x.html"), ["error: --html: must be a file", "/dev/null/x.html"]),
], ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, tuple) else "")
def test_mistakes_get_a_message_and_exit_code_2(arguments: tuple[str, ...], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


def test_a_prompt_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"ab\xff\xfe")
    result = run("generate", "--prompt", str(file))
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr
    assert "byte 2" in result.stderr


@pytest.mark.parametrize("arguments", [("nothing",), ("generate", "--max-new-tokens", "0"), ("doctor", "--frobnicate")],
                         ids=" ".join)
def test_usage_errors_exit_with_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("error", "code", "words"), [
    (InvalidArgument("scale: must be positive"), 2, "scale: must be positive"),
    (OutOfPages("no pages left"), 2, "no pages left"),
    (ModuleNotFoundError("No module named 'transformers'", name="transformers.models"), 2,
     "pip install 'wavefill[transformers]'"),
    (PermissionError(13, "Permission denied", "report.json"), 2, "report.json: Permission denied"),
    (MemoryError(), 2, "not enough memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2048000000 bytes"), 2,
     "not enough memory"),
    (RuntimeError("the sky fell"), 1, "unexpected RuntimeError: the sky fell"),
    (ModuleNotFoundError("No module named 'wavefill.nothing'", name="wavefill.nothing"), 1, "WAVEFILL_DEBUG=1"),
    (KeyboardInterrupt(), 130, "interrupted"),
], ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "")
def test_errors_have_an_exit_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("wavefill.select.explain", lambda *a, **k: fail())
    result = run("explain", "--lens", "10")
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_debug_shows_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVEFILL_DEBUG", "1")
    with pytest.raises(RuntimeError, match="the sky fell"), _errors.plain_errors({}):
        raise RuntimeError("the sky fell")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for a child process")
def test_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    # A prompt from standard input that never comes: the command waits, with its signal handling in place. A shell's
    # background job ignores the signal and hands that on, so the child takes Python's own handler first.
    code = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from wavefill.cli import main; print('up', flush=True); main()")
    child = subprocess.Popen([sys.executable, "-c", code, "generate", "--prompt", "-"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in stderr


def test_starting_up_loads_neither_torch_nor_numpy() -> None:
    heavy = ("torch", "numpy", "transformers")
    done = python(f"import sys, wavefill.cli; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_importing_wavefill_loads_nothing_but_its_names() -> None:
    """Beside the standard library; `wavefill bench overhead` measures how long that takes."""
    done = python("import sys; before = set(sys.modules); import wavefill; new = set(sys.modules) - before\n"
                  "print(sorted(name for name in new if name.split('.')[0] not in sys.stdlib_module_names))")
    assert done.stdout == "['wavefill', 'wavefill.spec']\n", done.stderr


def test_commands_of_the_core_install_run_without_torch() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'gguf', 'safetensors'))); "
    call = "sys.argv = ['wavefill', *{}]; from wavefill.cli import main; main()"
    explained = python(blocked + call.format(["explain", "--lens", "4096", "--json"]))
    assert json.loads(explained.stdout), explained.stderr
    generated = python(blocked + call.format(["generate"]))
    assert generated.returncode == 2
    assert "pip install 'wavefill[" in generated.stderr
    assert "Traceback" not in generated.stderr


def test_no_command_opens_a_connection() -> None:
    code = ("import socket, sys\n"
            "def refuse(*a): raise SystemExit('a connection was opened')\n"
            "socket.socket.connect = socket.getaddrinfo = refuse\n"
            "sys.argv = ['wavefill', 'doctor', '--json']\n"
            "from wavefill.cli import main; main()")
    done = python(code)
    assert json.loads(done.stdout), done.stderr


ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(("variables", "arguments"), [
    *((ASCII, arguments) for arguments in (
        ["explain", "--lens", "4096,100"], ["explain", "--lens", "9", "--html", "{tmp}/\N{HANGUL SYLLABLE GA}.html"],
        ["explain", "--lens", "70", "--emulate"], ["explain", "--help"], ["bench", "--help"], ["doctor"],
    )),
    *((few, arguments) for few in ({"COLUMNS": "0", "LINES": "0"}, {"COLUMNS": ""}, ASCII | {"COLUMNS": "00"})
      for arguments in (["explain", "--lens", "4096,100"], ["--help"])),
], ids=repr)
def test_any_terminal_will_do(variables: dict[str, str], arguments: list[str], tmp_path: Path) -> None:
    done = python("from wavefill.cli import main; main()",
                  *[argument.replace("{tmp}", str(tmp_path)) for argument in arguments], **variables)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 300
    assert "error" not in done.stderr
    if "PYTHONIOENCODING" in variables:
        assert done.stdout.isascii()


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_no_output_at_all_is_no_error(more: list[str]) -> None:
    done = python("import sys; sys.stdout = None; from wavefill.cli import main; main()",
                  "explain", "--lens", "9", *more)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [("generate", "--prompt", "~nobody-of-this-name/x"),
                                       ("generate", "--model", "~nobody-of-this-name/x")], ids=lambda words: words[1])
def test_the_home_of_nobody_is_a_path_like_any(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "~nobody-of-this-name/x" in result.stderr


def test_text_of_a_model_goes_to_any_terminal() -> None:
    code = ("import sys, typer; from wavefill.cli import _errors; app = typer.Typer(); "
            "app.command()(lambda: sys.stdout.write('\\u201cOh dear\\u201d')); _errors.run(app)")
    assert python(code, **ASCII).stdout == "?Oh dear?"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = "import sys; sys.argv = ['wavefill', 'explain', '--lens', '64x4096']; from wavefill.cli import main; main()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    stderr = child.stderr.read()
    child.wait(timeout=60)
    assert "Traceback" not in stderr
    assert "error" not in stderr


def test_environment_variables_are_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(env.VARIABLES) <= 10
    assert all(variable.name.startswith(env.PREFIX) for variable in env.VARIABLES)
    monkeypatch.setenv("WAVEFILL_DEBUG", "yes")
    with pytest.raises(InvalidArgument, match="WAVEFILL_DEBUG: must be 0 or 1; got 'yes'"):
        env.flag("WAVEFILL_DEBUG")
    monkeypatch.setenv("WAVEFILL_DEBUG", "")
    assert env.get("WAVEFILL_DEBUG") is None
    monkeypatch.setenv("WAVEFILL_CACHE_DIR", str(tmp_path))
    assert env.cache_dir() == tmp_path
    monkeypatch.setenv("WAVEFILL_CACHE_DIR", "~nobody-of-this-name/x")
    assert str(env.cache_dir()) == "~nobody-of-this-name/x"
    monkeypatch.delenv("WAVEFILL_CACHE_DIR")
    assert env.cache_dir().name == "wavefill"
    with pytest.raises(KeyError):
        env.get("WAVEFILL_NO_SUCH")
