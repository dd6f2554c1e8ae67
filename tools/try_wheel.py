"""Try a built wheel as someone who has nothing else: look into it, install it alone, run what works without torch.

    python tools/try_wheel.py dist/wavefill-0.1.0-cp311-cp311-linux_x86_64.whl

Exits with 1 and a sentence at the first thing that is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"


class WheelError(Exception):
    """The wheel is not what it should be."""


def look_into(wheel: Path) -> None:
    """All of the package is there, compiled once, without the C++ sources; a GPU's are compiled when they run."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path.relative_to(SOURCE).as_posix() for kind in ("*.py", "*.pyi", "data/*", "py.typed", "*.cu", "*.cuh")
              for path in (SOURCE / "wavefill").rglob(kind) if path.is_file()}
    if missing := sorted(wanted - names):
        raise WheelError(f"not in the wheel: {', '.join(missing)}")
    for licence in ("LICENSE", "NOTICE"):
        if not any(name.endswith(f".dist-info/licenses/{licence}") for name in names):
            raise WheelError(f"{licence} is not in the wheel")
    extra = sorted(name for name in names - wanted if ".dist-info/" not in name)
    if len(extra) != 1 or not extra[0].startswith("wavefill/backends/cpu/_core."):
        raise WheelError(f"beside the package there must be its compiled core alone, and there is: {', '.join(extra)}")
    print(f"{wheel.name}: {len(names)} files, core {extra[0]}")


def run(command: list[str | Path], *, code: int = 0) -> str:
    """What a command printed to both streams; `WheelError` unless it ends with `code`."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in command], env=environment, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != code or "Traceback" in done.stdout:
        raise WheelError(f"{' '.join(map(str, command))} ended with {done.returncode} where {code} is right, and "
                         f"printed:\n{done.stdout}")
    return done.stdout


def try_in(folder: Path, wheel: Path) -> None:
    """Install the wheel alone into a new environment in `folder` and run it."""
    venv.create(folder, with_pip=True)
    python, program = folder / "bin" / "python", folder / "bin" / "wavefill"
    run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", wheel])
    installed = run([python, "-m", "pip", "list", "--format", "freeze"])
    if "torch==" in installed:
        raise WheelError("the core install brings torch")

    run([program, "doctor"])
    cpu = json.loads(run([program, "doctor", "--json"]))["CPU backend"]
    if not cpu.get("kernel chosen") or not cpu["usable"].startswith("no: torch"):
        raise WheelError(f"doctor without torch says of the CPU backend: {cpu}")
    print(f"doctor: kernel {cpu['kernel chosen']}, {cpu['usable']}")

    page = folder / "timeline.html"
    explain = [program, "explain", "--lens", "17x8192", "--device", "H200"]
    run([*explain, "--html", page])
    choice = json.loads(run([*explain, "--json"]))
    if choice["kind"] != "stream_k" or not page.stat().st_size:
        raise WheelError(f"explain chose {choice['kind']} for a wave and one request more")
    print(f"explain: {choice['reason']}")

    for command in (["generate"], ["bench"], ["explain", "--lens", "64", "--emulate"]):
        if "pip install 'wavefill[" not in run([program, *command], code=2):
            raise WheelError(f"{command[0]} without torch does not say what to install")


def main() -> int:
    """The exit status."""
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} WHEEL", file=sys.stderr)
        return 2
    wheel = Path(sys.argv[1]).resolve()
    try:
        look_into(wheel)
        with tempfile.TemporaryDirectory(prefix="wavefill-wheel-") as folder:
            try_in(Path(folder), wheel)
    except WheelError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
