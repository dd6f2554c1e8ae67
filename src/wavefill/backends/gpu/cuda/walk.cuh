// Which rows a call has, and which segments of their units a program goes through.
#pragma once

// A row of `rows`: what its queries see, and where they are.
struct Block {
    i32 start, stop, request, first, count, position, base;

    __device__ __forceinline__ Block(const Args& a, i32 row) {
        auto plane = [&](i32 i) { return row_word(a, i * i64(a.B) + row); };
        start = plane(0), stop = plane(1), request = plane(2), first = plane(3), count = plane(4);
        position = plane(5), base = plane(6);
    }
};
__device__ __forceinline__ i32 used_tokens(const Args& a) { return row_word(a, PLANES * i64(a.B)); }
__device__ __forceinline__ i32 used_rows(const Args& a) { return row_word(a, PLANES * i64(a.B) + 1); }

__device__ __forceinline__ i32 most_upto(i32 x, i32 lane) {
    UNROLL_NOT for (i32 d = 1; d < 32; d *= 2) {
        const i32 other = __shfl_up_sync(ALL, x, d);
        if (lane >= d) x = most(x, other);
    }
    return x;
}

// What rows.py does in a kernel of its own, by one warp: a lane has a request, four of them at a time on their way.
__device__ __forceinline__ void make_rows(const Args& a, i32* rows, i32 lane) {
    constexpr i32 AHEAD = 4;
    i32 last = most(least(__ldg(a.starts), a.tokens), 0), total = 0;
    UNROLL_NOT for (i32 b0 = 0; b0 < a.requests; b0 += 32 * AHEAD) {
        i32 begins[AHEAD], ends[AHEAD], lengths[AHEAD];
#pragma unroll
        for (i32 i = 0; i < AHEAD; i++) {
            const i32 b = b0 + 32 * i + lane;
            const bool there = b < a.requests;
            begins[i] = there ? __ldg(a.starts + b) : 0, ends[i] = there ? __ldg(a.starts + b + 1) : 0;
            lengths[i] = there ? most(least(__ldg(a.seq + b), a.limit), 0) : 0;
        }
#pragma unroll
        for (i32 i = 0; i < AHEAD; i++) {
            if (b0 + 32 * i >= a.requests) break;
            // Offsets that fall are raised to the ones before; hardly ever one does, or a request has two rows.
            i32 begin = most(least(begins[i], a.tokens), last);
            if (__any_sync(ALL, ends[i] < begins[i])) begin = most_upto(begin, lane);
            const i32 end = most(least(ends[i], a.tokens), begin), tokens = end - begin;
            const i32 blocks = u32(tokens + a.block - 1) / u32(a.block), base = lengths[i] - tokens;
            const u32 some = __ballot_sync(ALL, blocks > 0);
            const i32 after = __any_sync(ALL, blocks > 1) ? i32(sum_before(blocks, lane)) + blocks
                                                          : __popc(some << (31 - lane));
            UNROLL_NOT for (i32 j = 0; j < blocks; j++) {
                const i32 count = least(tokens - j * a.block, a.block), position = base + j * a.block;
                const i32 stop = a.causal ? least(lengths[i], position + count) : lengths[i];
                const i32 start = a.window ? most(most(position + 1, 0) - a.window, 0) : 0;
                i32* const row = rows + total + after - blocks + j;
                row[0] = start < stop ? start : 0, row[a.B] = start < stop ? stop : 0;
                row[2 * a.B] = b0 + 32 * i + lane, row[3 * a.B] = begin + j * a.block, row[4 * a.B] = count;
                row[5 * a.B] = position, row[6 * a.B] = base;
            }
            total += __shfl_sync(ALL, after, 31);
            last = most(last, __reduce_max_sync(ALL, end));
        }
    }
    UNROLL_NOT for (i32 row = total + lane; row < a.B; row += 32) rows[row] = rows[a.B + row] = 0;
    if (lane == 0) rows[PLANES * a.B] = last, rows[PLANES * a.B + 1] = total;
}

// How tiles are shared out where KIND is STREAM_K. Fewer programs work where units of drafts are then cut alike.
__device__ __forceinline__ Runs runs_of(const Args& a, const Batch& batch) {
    if (!JOINED) return Runs(batch.tiles, a.programs);
    const i32 units = batch.rows * a.KH, left = units ? a.programs % units : 0;
    const i32 runs = units < a.programs && left * 8 <= a.programs ? a.programs - left : a.programs;
    return Runs(batch.tiles, i32(least(batch.tiles, Tiles(runs))));
}

// The segments of a program, one after the other.
struct Walk : Place {
    const Args& a;
    const i32 param;

    __device__ __forceinline__ Walk(const Args& a, i32 param, i32 lane)
        : a(a), param(param) {
        at = stop = 0, opened = false;
        if (KIND == ROUNDS) {
            round = -1, used = used_rows(a);
            const i64 bytes = used ? i64(row_word(a, i64(a.B) + used - 1)) * (D + DV) * 2 + 1 : 1;
            const i32 groups = i32(least((bytes * a.KH + L2_BYTES - 1) / L2_BYTES, i64(a.KH)));
            heads = (a.KH + groups - 1) / groups;
            return;
        }
        const Batch batch = batch_of(a, lane);
        const Runs runs = runs_of(a, batch);
        if (i32(blockIdx.x) >= runs.count) return;
        at = runs.cut(blockIdx.x), stop = runs.cut(blockIdx.x + 1);
        if (at < stop) c = cursor_at(a, batch, at, stop, param, 0, lane);
    }

    // The parameter of the schedule, worked out before roles part and have their registers.
    static __device__ __forceinline__ i32 parameter(const Args& a, i32 lane) {
        if (KIND != SPLITS) return a.param;
        if (SCANNED) return i32(__ldg(a.before + 2 * a.B + 2));
        const Batch batch = batch_of(a, lane);
        return splits(batch.rows, batch.longest, a.KH, gridDim.x, a.param, a.rule);
    }

    __device__ __forceinline__ bool more() {
        if (KIND != ROUNDS) return at < stop;
        const i32 programs = gridDim.x;
        do {
            round++;
            const i32 item = round * programs + (param == 1 && round % 2 ? programs - 1 - i32(blockIdx.x) : blockIdx.x);
            if (item >= used * a.KH * param) return false;
            if (param == 1) { // heads in groups whose K and V fit into L2
                const i32 group = item / (used * heads), left = item - group * used * heads;
                const i32 here = least(heads, a.KH - group * heads);
                c.row = used - 1 - left / here, c.head = group * heads + left % here, c.piece = 0;
            } else {
                const i32 left = item % (used * param);
                c.head = item / (used * param), c.piece = left / used, c.row = left % used;
            }
            const Row r = row_at(a, c.row);
            c.first = r.first, c.n = r.n, c.size = least(r.n, param);
        } while (c.piece >= c.size);
        c.t = i32(over64(i64(c.piece) * c.n, c.size)), c.end = i32(over64(i64(c.piece + 1) * c.n, c.size));
        return true;
    }

    // Whether the segment is its unit, and the slot of its partial state.
    __device__ __forceinline__ bool whole() const {
        if (KIND == ROUNDS) return c.size == 1;
        return KIND == STREAM_K ? c.end - c.t == c.n : pieces(c.n, c.size) == 1;
    }
    __device__ __forceinline__ i64 slot(i32 lane) const {
        if (KIND == STREAM_K) return 2 * i64(blockIdx.x) + opened;
        if (KIND == ROUNDS) {
            i32 before = 0; // pieces of the rows before this one
            for (i32 row = lane; row < c.row; row += 32) before += least(row_at(a, row).n, param);
            return i64(__reduce_add_sync(ALL, before)) * a.KH + c.head * c.size + c.piece;
        }
        return c.cut + i64(c.head) * pieces(c.n, c.size) + c.piece;
    }

    __device__ __forceinline__ void next() {
        if (KIND == ROUNDS) return;
        at += c.end - c.t, opened = true;
        if (at < stop) next_segment(a, c, param, stop - at);
    }
};

// Results of query tokens that see no key, and of those before and past all requests, where no merge comes after.
__device__ __forceinline__ void write_empty(const Args& a, i32 thread, i32 threads) {
    const i32 programs = gridDim.x, heads = a.KH * a.G, used = used_tokens(a);
    auto nothing = [&](i64 token, bool sinks) {
        UNROLL_NOT for (i32 x = thread; x < heads * (DV / 2); x += threads) {
            const i32 head = x / (DV / 2), column = x % (DV / 2);
            reinterpret_cast<u32*>(a.out + token * a.o_b + head * a.o_h)[column] = 0;
            if (column == 0) a.lse[token * a.l_b + head * a.l_h] = SINKS && sinks ? __ldg(a.sinks + head) : NOTHING;
        }
    };
    UNROLL_NOT for (i32 row = blockIdx.x; row < used_rows(a); row += programs) {
        const Block block(a, row);
        if (block.stop > block.start) continue;
        UNROLL_NOT for (i32 token = 0; token < block.count; token++) nothing(block.first + token, true);
    }
    const i32 first = JOINED ? (used_rows(a) ? Block(a, 0).first : used) : row_word(a, PLANES * i64(a.B) + 2);
    const i32 gap = used - first;
    UNROLL_NOT for (i32 i = blockIdx.x; i < a.tokens - gap; i += programs) nothing(i < first ? i : i + gap, false);
}
