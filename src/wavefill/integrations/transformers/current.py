"""The step that the running forward belongs to, one per thread.

transformers hands neither the cache to the mask function nor the padding to the cache, so the forward hook, which sees
both, leaves the step here: the mask function passes it on to the layers, and the cache takes the new K and V only while
its own step is the current one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wavefill.integrations.transformers.rows import Step


class _Current(threading.local):
    step: Step | None = None


_current = _Current()


def set_step(step: Step | None) -> None:
    """Make `step` the one of this thread's running forward; None ends it."""
    _current.step = step


def get_step() -> Step | None:
    """The step of this thread's running forward, or None outside of one."""
    return _current.step
