"""Decode attention for Hopper, in Gluon: a warp that only copies, and warps that only compute.

The plain Triton kernel drains its pipeline at the end of every segment and computes an address for every 16 bytes it
copies. Here one warp, the producer, walks all of a worker's tiles with a cursor of its own and asks the tensor memory
accelerator for whole boxes of pages (`BOX` tokens of one KV head), up to `STAGES` tiles ahead. It does not know where
the consumers are, so the next row's pages are on their way while the last one's state is stored, and neither the block
table nor the arithmetic of the schedule is ever on the path of the scores.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma

from wavefill.backends.gpu.cursor import STREAM_K, next_segment, pieces, start, totals


@gluon.constexpr_function
def tile_layout(tokens, columns, box, piece):
    """Where the element (token, column) of a tile lies that arrives as boxes [1, 1, columns / piece, box, piece].

    The accelerator writes a row of `piece` elements after the other, and swaps the 16-byte chunks of each by the bits 7
    to 9 of its address, so that the same chunk of eight tokens lies in eight different groups of banks.
    """
    chunks = piece.bit_length() - 4
    bases = [[0, 1 << i] for i in range(3 + chunks)]
    rows = [[1 << i, 0] for i in range(box.bit_length() - 1)]
    rows += [[0, piece << i] for i in range((columns // piece).bit_length() - 1)]
    rows += [[box << i, 0] for i in range((tokens // box).bit_length() - 1)]
    for i in range(len(rows)):
        swap = 8 << (i + chunks - 3) if 3 - chunks <= i < 3 else 0
        bases.append([rows[i][0], rows[i][1] ^ swap])
    return gl.SharedLinearLayout(bases)


@gluon.jit
def _produce(K, V, TABLE, SEQ, s_table, k_smem, v_smem, full, empty, KH, window, limit, param, rule,
             row, length, first, n, size, cut, head, piece, t, end, at, stop,
             T: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr, BYTES: gl.constexpr, KIND: gl.constexpr,
             STAGES: gl.constexpr):
    """Copy the tiles of a worker, one after the other, into the stages as they fall empty.

    A box without a key that is seen is replaced by the nearest one that has some, so that nothing else is read.
    """
    BOXES: gl.constexpr = T // BOX
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    while at < stop:
        row_table = TABLE + row.to(gl.int64) * s_table
        last = (length - 1) // BOX * BOX
        low = gl.where(window > 0, gl.maximum(length - window, 0), 0) // BOX * BOX
        for tile in range(first + t, first + end):
            pages = ()
            for j in gl.static_range(BOXES):
                token = gl.maximum(gl.minimum(tile * T + j * BOX, last), low)
                if PAGE:
                    pages += (gl.load(row_table + token // PAGE), token % PAGE)
                else:
                    pages += (row, token)
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            for j in gl.static_range(BOXES):
                box = [pages[2 * j], head, 0, pages[2 * j + 1], 0]
                tma.async_copy_global_to_shared(K, box, bar, k_smem.index(stage * BOXES + j))
                tma.async_copy_global_to_shared(V, box, bar, v_smem.index(stage * BOXES + j))
            stage += 1
            if stage == STAGES:
                stage = gl.to_tensor(0)
                phase = phase ^ 1
        at += end - t
        if at < stop:
            row, length, first, n, size, cut, head, piece, t, end = next_segment(
                SEQ, row, length, first, n, size, cut, head, piece, end, KH, at, stop, window, limit, param, rule,
                T, KIND)


@gluon.jit
def _consume(Q, SEQ, OUT, LSE, PART_O, PART_M, PART_L, k_tiles, v_tiles, full, empty, qk_scale,
             KH, G, window, limit, param, rule, s_qb, s_qh, s_ob, s_oh, s_lb, s_lh, worker,
             row, length, first, n, size, cut, head, piece, t, end, at, stop,
             D: gl.constexpr, DV: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, GP: gl.constexpr,
             T: gl.constexpr, KIND: gl.constexpr, STAGES: gl.constexpr):
    """Turn tiles into states: scores, online softmax and the weighted sum, and a result or a partial state a segment.

    Warps share a tile: its tokens for the scores, the columns of V for the weighted sum, and first of all the query
    heads where there are more than 16.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DOWN: gl.constexpr = min(GP // 16, WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[DOWN, WARPS // DOWN],
                                                  instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    along_g: gl.constexpr = gl.SliceLayout(1, mma)
    o_g = gl.arange(0, GP, layout=along_g)
    o_q = gl.arange(0, GP, layout=gl.SliceLayout(1, left))
    o_d = gl.arange(0, DP, layout=gl.SliceLayout(0, left))
    o_v = gl.arange(0, DVP, layout=gl.SliceLayout(0, mma))
    o_t = gl.arange(0, T, layout=gl.SliceLayout(0, mma))
    m_g = o_g < G
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    opened = gl.to_tensor(0)
    while at < stop:
        q_row = Q + row.to(gl.int64) * s_qb + (head * G + o_q).to(gl.int64) * s_qh
        b_q = gl.load(q_row[:, None] + o_d[None, :], mask=(o_q < G)[:, None] & (o_d < D)[None, :], other=0.0)
        b_m = gl.full([GP], float("-inf"), gl.float32, layout=along_g)
        b_sums = gl.full([GP, T], 0.0, gl.float32, layout=mma)  # summed over tokens when the segment ends
        b_acc = gl.full([GP, DVP], 0.0, gl.float32, layout=mma)
        low = gl.where(window > 0, gl.maximum(length - window, 0), 0)
        for tile in range(first + t, first + end):
            mbarrier.wait(full.index(stage), phase)
            b_k = k_tiles.index(stage).permute((1, 0)).load(right)
            b_s = mma_v2(b_q, b_k, gl.full([GP, T], 0.0, gl.float32, layout=mma)) * qk_scale
            if (tile * T < low) | (tile * T + T > length):
                token = tile * T + o_t
                b_s = gl.where(((token >= low) & (token < length))[None, :], b_s, float("-inf"))
                _clear(v_tiles.index(stage), tile * T, low, length, T)
                fence_async_shared()
            b_new = gl.maximum(b_m, gl.max(b_s, 1))
            b_alpha = gl.exp2(b_m - b_new)
            b_p = gl.exp2(b_s - b_new[:, None])
            b_m = b_new
            b_sums = b_sums * b_alpha[:, None] + b_p
            b_v = v_tiles.index(stage).load(right)
            b_acc = mma_v2(gl.convert_layout(b_p.to(b_v.dtype), left), b_v, b_acc * b_alpha[:, None])
            # Reads that are still on their way must not meet the copy that follows: it goes another way than they do.
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage))
            stage += 1
            if stage == STAGES:
                stage = gl.to_tensor(0)
                phase = phase ^ 1
        b_l = gl.sum(b_sums, 1)
        if KIND == STREAM_K:
            alone = end - t == n
            slot = 2 * worker.to(gl.int64) + opened
        else:
            count = pieces(n, size, KIND)
            alone = count == 1
            slot = cut + head.to(gl.int64) * count + piece
        m_o = m_g[:, None] & (o_v < DV)[None, :]
        if alone:
            o_row = OUT + row.to(gl.int64) * s_ob + (head * G + o_g).to(gl.int64) * s_oh
            gl.store(o_row[:, None] + o_v[None, :], (b_acc / b_l[:, None]).to(OUT.dtype.element_ty), mask=m_o)
            gl.store(LSE + row.to(gl.int64) * s_lb + (head * G + o_g).to(gl.int64) * s_lh,
                     (b_m + gl.log2(b_l)) * 0.6931471805599453, mask=m_g)
        else:
            p_row = slot * G + o_g
            gl.store(PART_O + p_row[:, None] * DV + o_v[None, :], b_acc, mask=m_o)
            gl.store(PART_M + p_row, b_m, mask=m_g)
            gl.store(PART_L + p_row, b_l, mask=m_g)
        opened = gl.to_tensor(1)
        at += end - t
        if at < stop:
            row, length, first, n, size, cut, head, piece, t, end = next_segment(
                SEQ, row, length, first, n, size, cut, head, piece, end, KH, at, stop, window, limit, param, rule,
                T, KIND)


@gluon.jit
def decode(Q, K, V, TABLE, SEQ, BEFORE, OUT, LSE, PART_O, PART_M, PART_L, qk_scale,
           B, KH, G, window, limit, param, rule, s_qb, s_qh, s_ob, s_oh, s_lb, s_lh, s_table,
           D: gl.constexpr, DV: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, GP: gl.constexpr,
           T: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr, KIND: gl.constexpr,
           SCANNED: gl.constexpr, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr, PDL: gl.constexpr):
    """Shapes and strides are those of `launch.decode`; K and V are tensor descriptors as `kernels.box_shape` has them;
    GP, DP and DVP are G, D and DV rounded up to powers of two, GP to 16 at least. PAGE is the page size, a multiple of
    BOX, or 0 for contiguous caches.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k_smem = gl.allocate_shared_memory(K.dtype, [STAGES * (T // BOX)] + K.block_shape, K.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(V.dtype, [STAGES * (T // BOX)] + V.block_shape, V.layout)  # noqa: RUF005
    k_tiles = k_smem._reinterpret(K.dtype, [STAGES, T, DP], tile_layout(T, DP, BOX, K.block_shape[4]))
    v_tiles = v_smem._reinterpret(V.dtype, [STAGES, T, DVP], tile_layout(T, DVP, BOX, V.block_shape[4]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()

    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    o_b = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    total, param = totals(SEQ, BEFORE, B, KH, workers, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED)
    row, length, first, n, size, cut, head, piece, t, end, at, stop = start(
        SEQ, BEFORE, B, KH, worker, workers, total, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED)
    gl.warp_specialize([
        (_consume, (Q, SEQ, OUT, LSE, PART_O, PART_M, PART_L, k_tiles, v_tiles, full, empty, qk_scale,
                    KH, G, window, limit, param, rule, s_qb, s_qh, s_ob, s_oh, s_lb, s_lh, worker,
                    row, length, first, n, size, cut, head, piece, t, end, at, stop,
                    D, DV, DP, DVP, GP, T, KIND, STAGES)),
        (_produce, (K, V, TABLE, SEQ, s_table, k_smem, v_smem, full, empty, KH, window, limit, param, rule,
                    row, length, first, n, size, cut, head, piece, t, end, at, stop,
                    T, BOX, PAGE, T * (DP + DVP) * 2, KIND, STAGES)),
    ], [1], [COPY_REGISTERS])


@gluon.jit
def _clear(v_tile, token, low, length, T: gl.constexpr):
    """Zero the values outside of [low, length): a weight of zero does not keep a NaN out of a sum."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = token + gl.arange(0, T, layout=gl.SliceLayout(1, rows))
    b_v = v_tile.load(rows)
    v_tile.store(gl.where(((o_t >= low) & (o_t < length))[:, None], b_v, 0.0))
