"""Decode over a paged KV cache that you keep yourself.

Two requests of different lengths share one pool of pages. `block_table` says where each request's tokens lie,
`seq_lens` how many there are. There is no plan step: the lengths may change with every call.
"""

import torch

import wavefill

B, HQ, KH, D = 2, 32, 8, 128  # requests, query heads, KV heads, head size
PAGE, PAGES = 16, 512
LENGTHS = [5000, 777]

torch.manual_seed(0)
q = torch.randn(B, HQ, D, dtype=torch.bfloat16)
k_cache, v_cache = torch.randn(2, PAGES, PAGE, KH, D, dtype=torch.bfloat16)

# Pages in any order. Slots past a request's last page are never read, so they may hold anything.
free = torch.randperm(PAGES, dtype=torch.int32)
needed = [-(-n // PAGE) for n in LENGTHS]
block_table = torch.full((B, max(needed)), -1, dtype=torch.int32)
for request, count in enumerate(needed):
    block_table[request, :count], free = free[:count], free[count:]
seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)

out, lse = wavefill.decode_attention(q, k_cache, v_cache, seq_lens, block_table, return_lse=True)
print(f"out {list(out.shape)} {out.dtype}, lse {list(lse.shape)} {lse.dtype}")

# The same through PyTorch: gather each request's pages, then one softmax in float32.
for request, n in enumerate(LENGTHS):
    pages = block_table[request, : needed[request]].long()
    k, v = (cache[pages].flatten(0, 1)[:n].transpose(0, 1).float() for cache in (k_cache, v_cache))  # [KH, n, D]
    expected = torch.nn.functional.scaled_dot_product_attention(q[request, :, None].float(), k, v, enable_gqa=True)
    error = (out[request].float() - expected[:, 0]).abs().max().item()
    print(f"request {request}: {n} tokens, largest difference from float32 sdpa {error:.1e}")
    assert error < 2**-9, "bfloat16 rounds results of this size by less"

# Every schedule computes the same; "invariant" also gives a request the same bits in any batch.
together = wavefill.decode_attention(q, k_cache, v_cache, seq_lens, block_table, schedule="invariant")
alone = wavefill.decode_attention(q[:1], k_cache, v_cache, seq_lens[:1], block_table[:1], schedule="invariant")
assert torch.equal(together[:1], alone)
print("invariant: request 0 has the same bits alone and beside request 1")
