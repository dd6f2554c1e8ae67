"""Continuous batching of transformers (`model.generate_batch` and its managers) through wavefill.

`attach(model)` is part of `enable(model)`, `detach(model)` of `disable(model)`. The attention function that `enable`
registers asks `is_paged_call` first, and gives a paged call to `forward`. `contract.py` says why each transformers
contract has a file of its own, `hooks.py` all that is done to a model.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from wavefill.integrations.transformers.continuous import hooks
from wavefill.integrations.transformers.continuous.call import forward, is_paged_call
from wavefill.integrations.transformers.continuous.detect import tested_range

__all__ = ["attach", "detach", "forward", "is_paged_call", "tested_range"]


def attach(model: PreTrainedModel) -> None:
    """Let `model.generate_batch` and the model's managers run through wavefill.

    The contract of the installed transformers is found and checked now. When it is no tested one, `generate` is not
    concerned, and each way into continuous batching raises `BackendUnavailable` with the tested range.
    """
    hooks.install(model)


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`, and give the model's attention the name that it has outside of continuous batching.

    Raises `InvalidArgument` while a manager of the model generates: its batches could be finished by nothing else.
    """
    hooks.uninstall(model)
