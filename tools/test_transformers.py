"""Run tests/transformers on each supported transformers release, in environments that this script makes and reuses.

    python tools/test_transformers.py                                  # all releases
    python tools/test_transformers.py --release 5.17.0 -- -k tokens    # one release, arguments for pytest
    python tools/test_transformers.py --python .venv/bin/python        # on an environment that has wavefill and torch

One base environment holds torch and wavefill, in .envs/base unless --python names another. Each release lies in a
folder of its own, .envs/transformers-RELEASE, with only what differs from the base: transformers, and dependencies of
versions that the base has not. The folder goes onto PYTHONPATH in front of the base.

Exits with 1 if any release failed or ran no test.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVS = ROOT / ".envs"

#: The oldest release, both ends of each continuous-batching contract, one between, and the newest.
RELEASES = ("5.17.0", "5.18.0", "5.19.0", "5.22.2", "5.23.0", "5.24.0")

#: Installed before anything else, so that no other package chooses a torch; one for all releases, so that what differs
#: between them is transformers alone.
TORCH = "torch==2.13.0"

#: On a CPU, transformers sizes a paged cache with psutil, and finds no memory at all without it.
BESIDE = ("psutil",)

#: What the base environment must be able to import.
NEEDED = ("torch", "pytest", "wavefill.backends.cpu._core")


class SetupError(Exception):
    """An environment could not be made."""


@dataclass(frozen=True)
class Result:
    """One release's run: counts of tests, and what pytest printed."""

    release: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    output: str

    @property
    def ok(self) -> bool:
        return self.passed > 0 and self.failed == 0


def call(command: Sequence[str | Path], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository and capture what it prints."""
    return subprocess.run([str(part) for part in command], cwd=ROOT, env={**os.environ, **env}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def pip(python: Path, *arguments: str | Path) -> str:
    """What pip printed; `SetupError` with it when pip failed."""
    done = call([python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments])
    if done.returncode:
        raise SetupError(f"pip {' '.join(map(str, arguments))} failed:\n{done.stdout}")
    return done.stdout


# -- the base environment ------------------------------------------------------------------------------------------

def make_base() -> Path:
    """The interpreter of .envs/base, made or brought up to date."""
    folder = ENVS / "base"
    python = folder / "bin" / "python"
    stamp = folder / "ready.json"
    wanted = {"python": sys.version, "torch": TORCH, "sources": compiled_sources()}
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return python
    stamp.unlink(missing_ok=True)
    if not python.exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True)
    print(f"installing {TORCH} and wavefill into {folder}", flush=True)
    pip(python, "install", TORCH)
    # Compiled in a folder of its own: build/ is the developer's.
    pip(python, "install", "--config-settings", f"build-dir={folder / 'build'}", "--editable",
        f"{ROOT}[transformers,dev]", TORCH)
    stamp.write_text(json.dumps(wanted))
    return python


def compiled_sources() -> str:
    """A digest of all that an editable installation compiles or reads once."""
    digest = hashlib.sha256()
    code = [file for kind in ("*.cpp", "*.h") for file in (ROOT / "src").rglob(kind)]
    for file in sorted([ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", *code]):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def check_base(python: Path) -> None:
    """`SetupError` unless the environment has all that the tests import besides transformers."""
    done = call([python, "-c", f"import {', '.join(NEEDED)}"])
    if done.returncode:
        raise SetupError(f"--python: must have {', '.join(NEEDED)}; got {python}, which says\n{done.stdout}\n"
                         "Run pip install -e '.[transformers,dev]' in it, or leave --python out.")


# -- one release ---------------------------------------------------------------------------------------------------

def make_overlay(python: Path, release: str, base: str) -> Path:
    """The folder with transformers `release` and what it needs other than the base has.

    base: what is installed there; the folder is made again when that has changed.
    """
    folder = ENVS / f"transformers-{release}"
    stamp = folder / "ready.json"
    if stamp.exists() and json.loads(stamp.read_text()) == base:
        return folder
    print(f"installing transformers {release} into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = folder / "report.json"
    pip(python, "install", "--dry-run", "--report", report, f"transformers=={release}", *BESIDE)
    planned = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    pins = {item["name"].lower(): f"{item['name']}=={item['version']}" for item in planned}
    if "torch" in pins:
        raise SetupError(f"transformers {release} would replace torch by {pins['torch']}. Install {TORCH} in the base.")
    pins["transformers"] = f"transformers=={release}"
    pip(python, "install", "--no-deps", "--no-compile", "--target", folder, *pins.values())
    stamp.write_text(json.dumps(base))
    return folder


def installed(python: Path) -> str:
    """What the environment holds, wavefill itself aside."""
    lines = pip(python, "list", "--format", "freeze").splitlines()
    return "\n".join([str(python), *(line for line in lines if not line.startswith("wavefill"))])


def run_release(python: Path, release: str, overlay: Path, arguments: Sequence[str]) -> Result:
    """Run tests/transformers on one release."""
    report = overlay / "junit.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(overlay), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
           "TRANSFORMERS_VERBOSITY": "error"}
    seen = call([python, "-c", "import transformers; print(transformers.__version__)"], **env).stdout.strip()
    if seen.splitlines()[-1:] != [release]:
        return Result(release, 0, 1, 0, 0.0, f"transformers {release} was not imported, but this:\n{seen}\n")
    start = time.monotonic()
    done = call([python, "-m", "pytest", "tests/transformers", "-m", "transformers", "-p", "no:cacheprovider",
                 f"--junitxml={report}", *arguments], **env)
    seconds = time.monotonic() - start
    if not report.exists():
        return Result(release, 0, 1, 0, seconds, done.stdout)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failed, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    bad = failed + errors or int(done.returncode not in (0, 5))
    return Result(release, max(tests - failed - errors - skipped, 0), bad, skipped, seconds, done.stdout)


# -- all of them ---------------------------------------------------------------------------------------------------

def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="interpreter with torch, wavefill and pytest (default: .envs/base)")
    parser.add_argument("--release", action="append", help=f"transformers release (default: {', '.join(RELEASES)})")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1),
                        help="releases at a time (default: %(default)s)")
    parser.add_argument("--prepare", action="store_true", help="make the environments and stop")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    try:
        # Not resolved: a virtual environment's interpreter is a link out of it.
        python = options.python.absolute() if options.python else make_base()
        check_base(python)
        base = installed(python)
        overlays = {release: make_overlay(python, release, base) for release in options.release or RELEASES}
    except SetupError as problem:
        print(problem, file=sys.stderr)
        return 1
    if options.prepare:
        return 0
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(run_release, python, *overlay, options.pytest) for overlay in overlays.items()]
        for run in runs:
            result = run.result()
            print(f"== transformers {result.release}\n{result.output}", flush=True)
            results.append(result)
    for result in results:
        verdict = "ok" if result.ok else "FAILED" if result.failed else "RAN NO TEST"
        print(f"transformers {result.release}: {verdict}, {result.passed} passed, {result.failed} failed, "
              f"{result.skipped} skipped in {result.seconds:.0f} s")
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
