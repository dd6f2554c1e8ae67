"""No call compiles after `warmup`: with options or without, whatever its lengths, batch, bound and budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_several_gpu import on_gpu, run

import wavefill
from helpers import make_case
from wavefill.backends.gpu import kernels
from wavefill.spec import AttentionSpec

ALL = {"softcap": 2.0, "sinks": True, "alibi_slopes": True}
SHAPE: dict[str, Any] = {"HQ": 12, "KH": 4, "D": 64, "dtype": torch.float16, "page_size": 32}


@pytest.mark.parametrize("schedule", ["auto", "invariant"])
@pytest.mark.parametrize("given", [{}, {"sinks": True}, ALL, {**ALL, "mask": True}], ids=lambda given: "-".join(given))
def test_no_call_compiles_after_warmup(given: dict[str, Any], schedule: str) -> None:
    drafts = "mask" in given
    spec = AttentionSpec(12, 4, 64, 64, "float16", 32, q_len=8 if drafts else 1)
    wanted = wavefill.warmup([spec], schedules=[schedule], options=list(given), jobs=4)
    count = kernels.compiled_count
    assert count >= wanted
    for lens in ([70], [3000, 0, 65], [40] * 300, [7] * 1500):
        for most in ((8, 5, 1, None) if drafts else (None,)):
            q_lens = [min(most or 6, 1 + b % 8) for b in range(len(lens))] if drafts else None
            case = on_gpu(make_case(lens, q_lens=q_lens, **SHAPE, **given))
            more = {"max_q_len": most} if drafts else {}
            if drafts and most is None:  # of as many bits as there are query tokens
                case = replace(case, mask=torch.nn.functional.pad(case.mask, (0, case.q.shape[0] // 32 + 1)))
            for budget in (None, 4):
                run(case, schedule=schedule, sm_budget=budget, **more)
            run(case, schedule=schedule, window=20, **more)
    if drafts:
        run(on_gpu(make_case([600], q_lens=[600], **SHAPE, **given)), schedule=schedule)
    torch.cuda.synchronize()
    assert kernels.compiled_count == count
