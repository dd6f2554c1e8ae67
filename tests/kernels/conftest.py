"""Two kinds of tests that exclude each other, because Triton decides at import how it runs.

TRITON_INTERPRET=1: kernels run in Triton's interpreter. Without it they are compiled, which needs no GPU, and run where
there is one.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
COMPILING = ["test_compile.py", "test_cuda_schedule.py", "test_products.py"]

#: What runs kernels, and what looks into the interpreter.
RUNNING = ["test_interpret_decode.py", "test_interpret_several.py", "test_cases.py", "test_cases_scores.py"]
INTERPRETING = ["test_interpret_schedule.py", "test_interpret_rows.py", "test_interpret_libraries.py",
                "test_interpret_append.py", "test_interpret_pieces.py", "test_interpret_fused.py"]

collect_ignore = (COMPILING if INTERPRET else INTERPRETING if torch.cuda.is_available() else RUNNING + INTERPRETING)

if INTERPRET:
    from triton.runtime import interpreter

    _patch, _patched = interpreter._patch_lang, set()

    class _Kept:
        """What the interpreter takes for its changes to triton.language, which stay."""

        def restore(self) -> None:
            pass

    def _patch_once(fn: object) -> _Kept:
        """The interpreter makes and undoes the same changes at every call of every function: half of its time."""
        if fn not in _patched:
            _patched.add(fn)
            _patch(fn)
        return _Kept()

    interpreter._patch_lang = _patch_once


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter's own, thousands of times.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Registers, spills and shared memory of what was compiled."""
    if not INTERPRET:
        from compiling import REPORT

        for line in REPORT:
            terminalreporter.write_line(line)
