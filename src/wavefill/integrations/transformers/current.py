"""The step that the running forward belongs to, one per thread.

transformers hands neither the cache to the mask function nor the padding to the cache, so the forward hook, which sees
both, leaves the step here: the mask function passes it on to the layers, and the cache takes the new K and V only while
its own step is the current one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from wavefill.integrations.transformers.step import Step


P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keep `torch.compile` out of `function`, which hands addresses to the kernels or works on a step."""
    kept: Callable[P, R] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, reason="wavefill can't be a part of a graph. Compile an enabled model without fullgraph=True, or "
        "call wavefill.integrations.transformers.disable(model) first."
    )
    return kept


class _Current(threading.local):
    step: Step | None = None


_current = _Current()


def set_step(step: Step | None) -> None:
    """Make `step` the one of this thread's running forward; None ends it."""
    _current.step = step


def get_step() -> Step | None:
    """The step of this thread's running forward, or None outside of one."""
    return _current.step
