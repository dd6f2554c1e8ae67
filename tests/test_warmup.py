"""What `warmup` refuses, which needs no GPU; tests/kernels/test_warm.py and tests/gpu hold what it compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wavefill
from wavefill import AttentionSpec, BackendUnavailable, InvalidArgument, InvalidType

DECODE, DRAFTS = AttentionSpec(32, 8, 128, 128), AttentionSpec(32, 8, 128, 128, q_len=8)


@pytest.mark.parametrize(("specs", "given", "error", "words"), [
    ([(32, 8, 128, 128)], {}, InvalidType, r"^specs: must hold wavefill.AttentionSpec; got tuple\."),
    ([DECODE], {"schedules": ["split"]}, InvalidArgument, "^schedule: "),
    ([DECODE], {"options": ["soft_cap"]}, InvalidArgument,
     r"^options: must be of 'softcap', 'sinks', 'alibi_slopes', 'mask'; got 'soft_cap'\."),
    ([DECODE], {"options": ["window"]}, InvalidArgument, "^options: .* leave them out"),
    ([DECODE], {"options": [None]}, InvalidArgument, "^options: .*; got None"),
    ([DECODE], {"options": "sinks"}, InvalidType, r"^options: must be a sequence of names; got 'sinks'\."),
    ([DRAFTS, DECODE], {"options": ["sinks", "mask"]}, InvalidArgument, r"^options: .* q_len above 1; got 'mask'\."),
    ([DECODE], {"device": "cpu"}, InvalidArgument, "^device: must be a GPU; got cpu"),
])
def test_refusals(specs: list[Any], given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        wavefill.warmup(specs, **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(BackendUnavailable, match=r"^device: must be a GPU that torch can use; got cuda\."):
        wavefill.warmup([DRAFTS], options=("softcap", "sinks", "alibi_slopes", "mask"))
