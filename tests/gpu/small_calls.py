"""Small calls of every kind of kernel, for NVIDIA's compute-sanitizer, and their results held to the oracle.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/gpu/small_calls.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/small_calls.py --unchecked

Without torch's cache every tensor is an allocation of its own, so that reads past it are seen. --unchecked leaves the
oracle out, whose matrix products (cuBLAS) have hazards of their own.
"""

from __future__ import annotations

import sys
import time

import torch
from gpu_inputs import hold, problem

from wavefill import Fixed, Invariant

SCHEDULES = ("stream_k", "invariant", Fixed(), Fixed(splits=3), Invariant(chunk=64))
SHAPES = {
    "teams of a cluster": {"lens": [700], "HQ": 8, "KH": 2, "D": 128},
    "a unit of many programs": {"lens": [5000], "HQ": 8, "KH": 1, "D": 128},
    "units cut by runs": {"lens": [130, 1, 0, 333] * 20, "HQ": 16, "KH": 4, "D": 64},
    "rows in place of boxes": {"lens": [90, 0, 17], "HQ": 12, "KH": 2, "D": 96, "page": 5},
    "contiguous": {"lens": [90, 33], "HQ": 4, "KH": 2, "D": 80, "page": None, "order": "NHD"},
    "sixteen heads": {"lens": [200, 65], "HQ": 16, "KH": 1, "D": 128, "dtype": torch.float16},
    "wide values": {"lens": [100], "HQ": 4, "KH": 1, "D": 256},
    "the portable kernel": {"lens": [150, 0, 40], "HQ": 6, "KH": 2, "D": 64, "dtype": torch.float32},
}


def main(checked: bool) -> None:
    began = time.perf_counter()
    for name, shape in SHAPES.items():
        inputs = problem(**shape)
        for schedule in SCHEDULES:
            for window in (None, 50):
                result = inputs.run(schedule=schedule, window=window)
                if checked:
                    hold(inputs, result, window)
        torch.cuda.synchronize()
        print(f"{name}: {'right' if checked else 'ran'}, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main("--unchecked" not in sys.argv[1:])
