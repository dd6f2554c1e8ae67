"""Many requests over one shared prefix, such as a system prompt: stored once, and read once.

`PagedKVCache.fork` shares the prefix's pages. `merge_states` puts two partial results together exactly, so the prefix
can be attended to once for all requests in one call, and each request's own tokens in another.
"""

import torch

import wavefill

REQUESTS, HQ, KH, D = 4, 8, 2, 64
PREFIX, OWN = 3000, 200  # tokens

torch.manual_seed(0)
cache = wavefill.PagedKVCache(128, kv_heads=KH, head_dim=D, dtype=torch.float32)


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of n tokens, [n, KH, D] each."""
    return torch.randn(n, KH, D), torch.randn(n, KH, D)


# Stored once: forks take no pages until they write, and then only for their own tokens.
(prefix,) = cache.add()
cache.append(prefix, *tokens(PREFIX))
before = cache.free_pages
requests = cache.fork(prefix, REQUESTS)
assert cache.free_pages == before
cache.append(requests, *tokens(REQUESTS * OWN))
print(f"{REQUESTS} requests of {PREFIX + OWN} tokens hold {cache.num_pages - cache.free_pages} pages of "
      f"{cache.page_size}; without sharing they would hold {REQUESTS * -(-(PREFIX + OWN) // cache.page_size)}")

q = torch.randn(REQUESTS, HQ, D)
pages = cache.view()
whole = wavefill.decode_attention(q, pages, None, cache.seq_lens(requests), cache.block_table(requests))

# Read once: all queries are query tokens of the one prefix, and none is causal to another.
over_prefix = wavefill.attention(
    q, pages, None, cache.seq_lens(prefix), cache.block_table(prefix),
    cu_seqlens_q=torch.tensor([0, REQUESTS], dtype=torch.int32), causal=False, return_lse=True)
# The rest starts inside the prefix's last page, which each fork has a copy of: from here on, page by page.
shared = PREFIX // cache.page_size
own_table = cache.block_table(requests)[:, shared:]
own_lens = cache.seq_lens(requests) - shared * cache.page_size
# That page holds some prefix tokens too; a window over exactly the own tokens leaves them out.
over_own = wavefill.decode_attention(q, pages, None, own_lens, own_table, window=OWN, return_lse=True)

outs, lses = (torch.stack(parts) for parts in zip(over_prefix, over_own, strict=True))
merged, _ = wavefill.merge_states(outs, lses)
difference = (merged - whole).abs().max().item()
print(f"prefix once and own tokens apart, merged: differs from one pass by {difference:.1e}")
assert difference < 1e-6
