"""Ctrl-C at any bytecode of a cache, for tests of what it leaves. It needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: What a cache is made of.
FILES = ("transformers/rows.py", "transformers/step.py", "wavefill/cache.py", "wavefill/pages.py")


def run(call: Callable[[], Any], stop: int = 0) -> int:
    """Bytecodes of the call in a cache's files; a KeyboardInterrupt comes at the stop-th of them, and ends here."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == stop:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count
