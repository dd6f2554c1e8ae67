"""Whole models on a machine with a GPU: `wavefill bench e2e --device cuda` from this checkout, nothing installed.

    python tools/gpu_e2e.py [--contexts 4k,16k] [--batches 1,8] [... options of wavefill bench e2e]

Takes the compiled core and keeps compiled kernels as gpu_session.py does. The JSON, written after each measurement,
goes to --output, else to gpu-e2e.json in $OUT or in build/gpu-session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_session


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    gpu_session.take_core()
    variables = {**gpu_session.environment(None, None, os.cpu_count() or 1), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "wavefill", "bench", "e2e", "--device", "cuda"]
    if "--output" not in sys.argv:
        folder = Path(os.environ.get("OUT") or gpu_session.ROOT / "build" / "gpu-session")
        command += ["--output", str(folder / "gpu-e2e.json")]
    return subprocess.run([*command, *sys.argv[1:]], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
