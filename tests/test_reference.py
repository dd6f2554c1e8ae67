"""The oracle against formulas that share nothing with it, and the emulator against the oracle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import helpers
from helpers import SCHEDULES, Case, make_case
from wavefill import Fixed, InvalidArgument, Invariant, StreamK, reference

MIXED = {
    "decode": {"seq_lens": [0, 1, 2, 3, 17, 40]},
    "decode-paged": {"seq_lens": [0, 1, 2, 3, 17, 40], "page_size": 3, "layout": "kv_tokens"},
    "decode-window": {"seq_lens": [0, 1, 7, 8, 9, 40], "window": 8, "page_size": 4},
    "drafts": {"seq_lens": [3, 9, 0, 20, 5], "q_lens": [2, 4, 0, 1, 5]},
    "more-queries-than-keys": {"seq_lens": [3, 0, 1], "q_lens": [5, 2, 4], "page_size": 2},
    "drafts-window": {"seq_lens": [3, 9, 20], "q_lens": [2, 4, 6], "window": 3, "page_size": 1},
    "not-causal": {"seq_lens": [3, 9, 0, 2], "q_lens": [2, 4, 1, 5], "causal": False},
    "latent": {"seq_lens": [5, 12], "q_lens": [1, 3], "D": 24, "DV": 16, "KH": 1, "latent": True, "page_size": 4},
    "options": {"seq_lens": [0, 1, 2, 17, 40], "softcap": 0.7, "sinks": True, "alibi_slopes": True, "window": 9},
    "options-of-drafts": {"seq_lens": [3, 45, 0, 2], "q_lens": [2, 40, 1, 5], "softcap": 0.7, "sinks": True,
                          "alibi_slopes": True, "mask": True, "page_size": 4, "HQ": 6, "KH": 3},
    "mask-not-causal": {"seq_lens": [3, 9, 0, 2], "q_lens": [2, 4, 1, 5], "causal": False, "mask": True, "scale": 2.0,
                        "alibi_slopes": True},
    "wide-values": {"seq_lens": [5, 12], "D": 8, "DV": 20, "HQ": 9, "KH": 3, "scale": 2.5},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with helpers.torch_threads(1):
        yield


def scalar_loop(case: Case) -> tuple[Tensor, Tensor]:
    """Attention one number at a time, in Python floats with exact sums; keys are looked up slot by slot."""
    out = torch.full(case.out_shape, math.nan, dtype=torch.float64)
    lse = torch.full(case.out_shape[:2], math.nan, dtype=torch.float64)
    B, HQ, D = len(case.seq_lens), case.q.shape[1], case.q.shape[2]
    KH, DV = case.k_cache.shape[2], case.out_shape[2]
    starts = list(range(B + 1)) if case.cu_seqlens_q is None else case.cu_seqlens_q.tolist()
    scale = D**-0.5 if case.scale is None else case.scale
    for b in range(B):
        length, n = int(case.seq_lens[b]), starts[b + 1] - starts[b]
        for i in range(n):
            position = length - n + i
            for h in range(HQ):
                query, scores, values = case.q[starts[b] + i, h].tolist(), [], []
                for j in range(length):
                    if case.causal and j > position:
                        continue
                    if case.window is not None and not position - case.window < j <= position:
                        continue
                    draft = j - (length - n)
                    if case.mask is not None and draft >= 0:
                        word = int(case.mask[starts[b] + i, draft // 32])
                        if not word >> (draft % 32) & 1:
                            continue
                    block, slot = b, j
                    if case.block_table is not None:
                        block, slot = int(case.block_table[b, j // case.k_cache.shape[1]]), j % case.k_cache.shape[1]
                    at = (block, slot, h * KH // HQ)
                    key = case.k_cache[at].tolist()
                    values.append(key[:DV] if case.v_cache is None else case.v_cache[at].tolist())
                    score = scale * math.fsum(x * y for x, y in zip(query, key, strict=True))
                    if case.softcap is not None:
                        score = case.softcap * math.tanh(score / case.softcap)
                    if case.alibi_slopes is not None:
                        score -= float(case.alibi_slopes[h]) * abs(position - j)
                    scores.append(score)
                logits = scores if case.sinks is None else [*scores, float(case.sinks[h])]
                top = max(logits, default=0.0)
                total = math.fsum(math.exp(s - top) for s in logits)
                for d in range(DV):
                    dot = math.fsum(math.exp(s - top) * value[d] for s, value in zip(scores, values, strict=True))
                    out[starts[b] + i, h, d] = dot / total if scores else 0.0
                lse[starts[b] + i, h] = top + math.log(total) if logits else -math.inf
    return out, lse


@pytest.mark.parametrize("options", MIXED.values(), ids=MIXED.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.name_of)
def test_oracle_equals_a_scalar_loop(options: dict[str, object], dtype: torch.dtype) -> None:
    case = make_case(**{"D": 8, **options, "dtype": dtype})
    out, lse = reference.attention(*case.tensors(), **case.options())
    want_out, want_lse = scalar_loop(case)
    torch.testing.assert_close(out, want_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 50])
@pytest.mark.parametrize("window", [None, 1, 5, 50])
def test_oracle_equals_the_last_rows_of_a_full_forward(n: int, window: int | None) -> None:
    """Bottom-right alignment by another road: all 50 tokens attend in one causal pass, and the last n are ours."""
    S = 50
    case = make_case([S], q_lens=[n], HQ=6, KH=2, D=16, dtype=torch.float64, window=window)
    full_q = torch.cat([torch.randn(S - n, 6, 16, dtype=torch.float64), case.q])
    k, v = (t[0].repeat_interleave(3, dim=1).transpose(0, 1) for t in (case.k_cache, case.v_cache))
    bias = torch.zeros(S, S, dtype=torch.float64).masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    if window is not None:
        bias = bias.masked_fill(torch.ones(S, S).tril(-window).bool(), -math.inf)
    log_p = torch.log_softmax(full_q.transpose(0, 1) @ k.mT / 4.0 + bias, dim=-1)
    out, lse = reference.attention(*case.tensors(), **case.options())
    torch.testing.assert_close(out, (log_p.exp() @ v).transpose(0, 1)[S - n :], rtol=1e-12, atol=1e-12)
    # On the diagonal, log p = score - LSE.
    diagonal = (full_q.transpose(0, 1) * k).sum(-1) / 4.0 - log_p.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(lse, diagonal.T[S - n :], rtol=1e-12, atol=1e-12)


def test_l2_two_queries_over_three_keys_by_hand() -> None:
    """With equal scores the output is the mean of what is seen: query 0 sees keys 0 and 1, query 1 all three."""
    v = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    k = torch.zeros(1, 3, 1, 1)
    out, lse = reference.attention(
        torch.ones(2, 1, 1), k, v, torch.tensor([3]), cu_seqlens_q=torch.tensor([0, 2])
    )
    assert out.flatten().tolist() == pytest.approx([5.5, 37.0], abs=1e-14)
    assert lse.flatten().tolist() == pytest.approx([math.log(2), math.log(3)], abs=1e-14)


def test_tokens_past_the_last_start_are_empty() -> None:
    case = make_case([4, 5], q_lens=[1, 2])
    q = torch.cat([case.q, torch.full((2, 4, 32), math.nan)])
    out, lse = reference.attention(q, *case.tensors()[1:], **case.options())
    assert (out[3:] == 0).all()
    assert (lse[3:] == -math.inf).all()
    assert lse[:3].isfinite().all()


def test_oracle_refuses_a_length_past_the_capacity() -> None:
    case = make_case([4], page_size=2)
    with pytest.raises(InvalidArgument, match=r"seq_lens: must lie in 0\.\.4; got \[5\]"):
        reference.attention(case.q, case.k_cache, case.v_cache, torch.tensor([5]), case.block_table)


class TestMergeStates:
    def test_equals_one_softmax_over_any_cut(self) -> None:
        case = make_case([30], dtype=torch.float64)
        whole_out, whole_lse = reference.attention(*case.tensors())
        parts = [
            reference.attention(case.q, case.k_cache[:, a:b], case.v_cache[:, a:b], torch.tensor([b - a]))
            for a, b in [(0, 1), (1, 1), (1, 13), (13, 30)]
        ]
        out, lse = reference.merge_states(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
        torch.testing.assert_close(out, whole_out, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=1e-13)

    def test_empty_states_are_the_identity_even_with_nan_in_them(self) -> None:
        outs = torch.tensor([[math.nan, math.nan], [3.0, 4.0], [math.inf, 0.0]]).unsqueeze(1)
        lses = torch.tensor([[-math.inf], [700.0], [-math.inf]])
        out, lse = reference.merge_states(outs, lses)
        assert out.tolist() == [[3.0, 4.0]]
        assert lse.tolist() == [700.0]

    @pytest.mark.parametrize("N", [0, 1, 2, 5])
    def test_only_empty_states_merge_to_the_empty_state(self, N: int) -> None:
        out, lse = reference.merge_states(torch.full((N, 3, 8), math.nan), torch.full((N, 3), -math.inf))
        assert torch.equal(out, torch.zeros(3, 8, dtype=torch.float64))
        assert (lse == -math.inf).all()

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_refuses_what_is_no_state(self, bad: float) -> None:
        with pytest.raises(InvalidArgument, match="lses"):
            reference.merge_states(torch.zeros(2, 1, 4), torch.tensor([[0.0], [bad]]))


@pytest.mark.parametrize("options", MIXED.values(), ids=MIXED.keys())
@pytest.mark.parametrize("schedule", [*SCHEDULES, Fixed(splits=4), Fixed(chunk=5), StreamK(tile=3), Invariant(chunk=8)],
                         ids=str)
@pytest.mark.parametrize("workers", [1, 3, 60])
def test_every_schedule_merges_to_one_softmax(options: dict[str, object], schedule: object, workers: int) -> None:
    case = make_case(**{"D": 8, **options})
    replay = reference.emulate(*case.tensors(), **case.options(), schedule=schedule, workers=workers, tile=4,
                               q_block=2 if workers == 3 else None, dtype=torch.float64)
    assert replay.deviation < 1e-13
    assert replay.lse_deviation < 1e-13
    assert torch.equal(replay.lse == -math.inf, case.expected.lse == -math.inf)
    assert sum(replay.tiles_per_worker) == sum(p.end - p.begin for p in replay.partials)


def test_partials_are_the_attention_of_their_keys_alone() -> None:
    case = make_case([90, 33], page_size=16)
    replay = reference.emulate(*case.tensors(), schedule="stream_k", workers=5, tile=8)
    assert [p.worker for p in replay.partials] == sorted(p.worker for p in replay.partials)
    for p in replay.partials:
        k, v = helpers.dense(case, replay.rows[p.row].request)
        keys, heads = slice(*p.keys), slice(p.head, p.head + 1)
        q = case.q[replay.rows[p.row].tokens, p.head * 2 : p.head * 2 + 2]
        out, lse = reference.attention(q, k[None, keys, heads], v[None, keys, heads], torch.tensor([len(k[keys])]))
        torch.testing.assert_close(p.out.double(), out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(p.lse.double(), lse, rtol=1e-6, atol=1e-6)


def test_a_schedule_that_loses_a_tile_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([90], dtype=torch.float64)
    real = reference.schedules.make_table

    def lossy(*args: object, **kwargs: object) -> object:
        table = real(*args, **kwargs)
        table.end[0] -= 1
        return table

    monkeypatch.setattr(reference.schedules, "make_table", lossy)
    replay = reference.emulate(*case.tensors(), schedule="fixed", workers=4, tile=8, dtype=torch.float64)
    assert replay.deviation > 1e-3
    assert replay.lse_deviation > 1e-3


@pytest.mark.parametrize("schedule", [Fixed(chunk=512), StreamK(), Invariant(chunk=512)], ids=str)
def test_the_documents_check(schedule: object) -> None:
    """Seed 42, 32 heads, D 128, 8,192 tokens, chunks of 512, float32: under 1e-5 from one softmax, with no term
    added to the denominator."""
    torch.manual_seed(42)
    q = torch.randn(1, 32, 1, 128)
    k = torch.randn(1, 32, 8192, 128)
    v = torch.randn(1, 32, 8192, 128)
    one = torch.softmax(q @ k.mT / math.sqrt(128.0), dim=-1) @ v
    replay = reference.emulate(
        q[:, :, 0], k.transpose(1, 2), v.transpose(1, 2), torch.tensor([8192]),
        schedule=schedule, workers=132, tile=256, dtype=torch.float32,
    )
    assert len(replay.partials) >= 132
    assert replay.merged_groups == 32
    assert float((replay.out - one[:, :, 0]).abs().max()) < 1e-5
    assert replay.deviation < 1e-6


def test_report_is_json_and_names_the_worst_head() -> None:
    case = make_case([0, 40], q_lens=[1, 3], page_size=8)
    replay = reference.emulate(*case.tensors(), **case.options(), schedule="stream_k", workers=3, tile=8)
    report = json.loads(json.dumps(replay.to_dict(), allow_nan=False))
    assert report["kind"] == "stream_k"
    assert report["tiles_per_worker"] == [3, 3, 4]
    assert report["merged_groups"] == 2
    assert [p["worker"] for p in report["partials"]] == [0, 1, 1, 2]
    assert report["partials"][0]["keys"] == [0, 24]
    assert report["deviation"] == replay.deviation
    token, head = report["worst"]["token"], report["worst"]["head"]
    lines = replay.summary(2)
    assert lines[0].startswith("stream_k: 10 tiles of 8 tokens on 3 workers (3 to 4 each), float32")
    assert lines[3] == "  and 2 more partial states"
    assert f"query token {token}, head {head}" in lines[-1]


def test_emulating_auto_is_refused() -> None:
    case = make_case([4])
    with pytest.raises(InvalidArgument, match="schedule"):
        reference.emulate(*case.tensors(), schedule="auto", workers=1, tile=4)


def test_emulating_an_empty_batch() -> None:
    case = make_case([])
    replay = reference.emulate(*case.tensors(), schedule="stream_k", workers=2, tile=4)
    assert (replay.deviation, replay.worst, replay.partials) == (0.0, None, [])
    assert replay.summary()
    assert replay.to_dict()["worst"] is None
