"""Several query tokens a request: bottom-right causal alignment, ragged counts, windows, no mask at all."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import wavefill
from helpers import DTYPES, SCHEDULES, check, check_each_isa, make_case, name_of, run, same_bits

#: name: keys and query tokens of each request.
BATCHES = {
    "drafts": ([70, 5, 200, 64], [4, 4, 4, 4]),
    "ragged": ([70, 0, 129, 1, 64, 300], [3, 0, 1, 1, 7, 0]),
    "mixed-with-a-chunk": ([300, 17, 64], [120, 1, 1]),
    "whole-prompt": ([150], [150]),
    "more-queries-than-keys": ([3, 0, 1, 64, 0], [5, 2, 4, 66, 1]),
    "no-queries": ([5, 9], [0, 0]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("window", [None, 1, 3, 64, 100, 1000], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not_causal"])
def test_batches(batch: tuple[list[int], list[int]], window: int | None, causal: bool) -> None:
    lens, q_lens = batch
    for (dtype, schedule), page_size in zip(zip(DTYPES, SCHEDULES, strict=True), (None, 1, 16), strict=True):
        check(make_case(lens, q_lens=q_lens, HQ=6, KH=2, D=24, DV=16, dtype=dtype, page_size=page_size, window=window,
                        causal=causal), schedule=schedule)


@pytest.mark.parametrize("G", [1, 2, 3, 4, 5, 7, 8, 16, 64, 128])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 17, 100])
def test_groups_and_query_counts(G: int, n: int) -> None:
    """However the query tokens times the group's heads are cut into blocks, each sees its own keys."""
    case = make_case([130, n, 65], q_lens=[n, n, 1], HQ=G, KH=1, D=16, dtype=torch.float16)
    check_each_isa(case, schedule="stream_k")


@pytest.mark.parametrize("schedule", [*SCHEDULES, wavefill.Fixed(splits=3), wavefill.StreamK(tile=5)], ids=str)
def test_every_key_count_up_to_two_tiles(schedule: object) -> None:
    """Three query tokens over 0 to 140 keys, windowed and not."""
    for window in (None, 5):
        case = make_case(range(141), q_lens=[3] * 141, HQ=2, KH=1, D=8, page_size=4, window=window)
        check(case, schedule=schedule)


@pytest.mark.parametrize(("D", "DV"), [(64, 64), (96, 96), (192, 128), (576, 512), (33, 17)],
                         ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_head_sizes(D: int, DV: int, dtype: torch.dtype) -> None:
    for layout, window in itertools.product(("nhd", "kv_tokens"), (None, 40)):
        check(make_case([100, 7], q_lens=[5, 2], HQ=8, KH=2, D=D, DV=DV, dtype=dtype, page_size=16, layout=layout,
                        window=window), schedule="stream_k")


def test_latent_cache() -> None:
    check(make_case([100, 7], q_lens=[3, 2], HQ=16, KH=1, D=576, DV=512, dtype=torch.bfloat16, page_size=64,
                    latent=True), schedule="stream_k")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_past_the_last_offset_are_empty(schedule: str) -> None:
    """A padded batch: the buffer of queries is longer than what is in use, and what follows may hold anything."""
    case = make_case([40, 70], q_lens=[2, 3])
    q = torch.cat([case.q, torch.full((4, *case.q.shape[1:]), math.nan)])
    out, lse = torch.full_like(q, math.nan), None
    out, lse = wavefill.attention(q, *case.tensors()[1:], cu_seqlens_q=case.cu_seqlens_q, out=out, return_lse=True,
                                  schedule=schedule)
    case.expected.check(out[:5], lse[:5])
    assert (out[5:] == 0).all()
    assert (lse[5:] == -math.inf).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_query_token_each_gives_the_bits_of_decode(schedule: str) -> None:
    case = make_case([40, 0, 700, 64], HQ=8, KH=2, dtype=torch.bfloat16, page_size=16, window=300)
    options = {"window": 300, "schedule": schedule, "return_lse": True}
    starts = torch.arange(5, dtype=torch.int32)
    decode = wavefill.decode_attention(*case.tensors(), **options)
    packed = wavefill.attention(*case.tensors(), cu_seqlens_q=starts, **options)
    assert same_bits(decode[0], packed[0])
    assert same_bits(decode[1], packed[1])


@pytest.mark.parametrize("split", [1, 2, 3, 6])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(split: int) -> None:
    """Chunked prefill: the queries of each chunk over the keys so far."""
    whole = make_case([60], q_lens=[60], HQ=4, KH=2, D=32, dtype=torch.float32)
    out, _ = run(whole, schedule="stream_k")
    size = 60 // split
    for at in range(0, 60, size):
        part = wavefill.attention(
            whole.q[at : at + size], whole.k_cache, whole.v_cache, torch.tensor([at + size], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, size], dtype=torch.int32),
        )
        torch.testing.assert_close(part, out[at : at + size], rtol=1e-5, atol=1e-6)
