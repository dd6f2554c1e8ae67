// Decode attention for GPUs of compute capability 9.0: one kernel, from lengths in device memory to the result.
//
// A unit is a (row, KV head) and lies in the linear order row -> head -> context, which is cut into runs. A team of
// programs of one cluster shares a run, several where there are fewer units than programs. A team goes through the
// segments of its run. Each warp reads 16 tokens at a time into a ring of its own and keeps a softmax state of its own,
// so that warps never wait for each other within a segment; at its end the states become one (join.cuh).
//
// Small calls are a chain of latencies, a few cycles for each instruction on the way. Hence few instructions: 32 bits
// where they are enough, loops that are not unrolled where they run once, everything for a load before what can wait.
//
// variant.cuh has T, KIND, SCANNED, WIDE (more than 2^31 tiles are possible), BF16, D, DV, NT (groups of eight query
// heads), WARPS, STAGES, BOXES (see attend.cuh), PAGE (tokens of a page, 0: contiguous), and what scores go through:
// CAPPED, SLOPED, SINKS.

#include "cursor.cuh"

typedef unsigned short u16;
typedef unsigned long long u64;

struct Args {
    const u16 *q, *k, *v;
    const i32 *table, *seq;
    const i64* before;
    u16* out;
    float *lse, *part_o, *part_m, *part_l;
    const float *sinks, *slopes;
    u32* counters; // tiles that have arrived of each unit that is cut, by its first run; zeros before and after
    i64 q_b, q_h, k_p, k_t, k_h, v_p, v_t, v_h, o_b, o_h, l_b, l_h, t_b;
    float scale, cap; // of the scores times log2(e); where CAPPED, of the products what the tanh takes, and its factor
    i32 B, KH, G, window, limit, param, rule;
    i32 align; // teams may lose one in so many to be a multiple of the units
};
struct __align__(64) Map {
    u64 words[16];
};
struct Maps {
    Map k, v;
};

#include "instructions.cuh"
#include "scan.cuh"
#include "attend.cuh"
#include "join.cuh"

// How the work is shared out: a team has as many programs as there are for a unit, and runs are of equal length. Where
// they nearly fit, only so many teams work that units of equal length are cut alike, or not at all. Where runs have
// several units of unequal length, those with many short ones would end last, because rings run dry between segments;
// so every unit counts `opening` tiles more than it has, up to an eighth of a run, which take no reading. A run can lie
// within an opening: its state is that of no keys.
struct Share {
    Runs runs;
    i32 log_team, opening;
};

__device__ __forceinline__ Share share_out(const Args& a, const Batch& batch, i32 programs, i32 cluster) {
    if (KIND != STREAM_K) return {Runs(batch.tiles, i32(least(batch.tiles, Tiles(programs)))), 0, 0};
    const i32 units = batch.rows * a.KH;
    // The exponent of programs / units; half a program keeps what divides exactly from being rounded down.
    const i32 log_share = (__float_as_int(__fdividef(programs + 0.5f, float(most(units, 1)))) >> 23) - 127;
    const i32 log_team = most(least(log_share, 31 - __clz(least(cluster, VECTORS))), 0);
    i32 teams = programs >> log_team;
    if (units && teams > units && teams % units * a.align <= teams) teams -= teams % units;
    const bool uneven = !SCANNED && 4 * units >= teams && batch.tiles != Tiles(batch.longest) * units;
    const i32 opening = uneven ? i32(least(Tiles(OPENING << log_team), over(batch.tiles, 8 * teams))) : 0;
    const Tiles tiles = batch.tiles + Tiles(opening) * units;
    return {Runs(tiles, i32(least(tiles, Tiles(teams)))), log_team, opening};
}

// Where a team is: a segment, and the linear tiles [at, stop) that are left of its run.
struct Place {
    Cursor c;
    Tiles at, stop;
    i32 run;
    bool opened; // a segment of the run was read before
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) unsigned char rings[];
    __shared__ Shared sh;
    const i32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, programs = gridDim.x;
    const i32 g0 = blockIdx.y * HEADS, G = least(a.G - g0, HEADS), vectors = G * VECTORS;
    asm volatile("griddepcontrol.launch_dependents;");
    if (PAGE && thread < 4) { // the table, if it is small, by the time that page ids are asked for
        const i64 at = (i64(blockIdx.x) * 4 + thread) * 32;
        if (at < (a.B - 1) * a.t_b + a.limit / (PAGE ? PAGE : 1)) prefetch(a.table + at);
    }
    if (BOXES && thread == 0) prefetch(maps.k), prefetch(maps.v);
    if (thread == 0) barrier_init(shared_address(sh.barriers)), barrier_init(shared_address(sh.barriers + 1));
    cluster_arrive();

    const Batch batch = batch_of(a, lane);
    const Share share = share_out(a, batch, programs, cluster_size());
    const Runs& runs = share.runs;
    Team team = {share.log_team, i32(blockIdx.x) & ((1 << share.log_team) - 1), 0};
    team.leader = cluster_rank() - team.rank;
    const i32 param = KIND == SPLITS ? SCANNED ? i32(__ldg(a.before + 2 * a.B + 2))
                                               : splits(batch.rows, batch.longest, a.KH, programs, a.param, a.rule)
                                     : a.param;
    u32* const counters = a.counters + blockIdx.y * programs;
    i32 rounds = 0; // of the team's exchange

    Place place = {{}, 0, 0, i32(blockIdx.x >> share.log_team), false};
    if (place.run < runs.count) {
        place.at = runs.cut(place.run), place.stop = runs.cut(place.run + 1);
        if (place.at < place.stop) place.c = cursor_at(a, batch, place.at, place.stop, param, share.opening, lane);
    }
    bool more = place.at < place.stop, ended = false;
    Segment done;
    Reader reader(maps, lane, shared_address(rings) + warp * RING, shared_address(sh.copies[warp]));
    UNROLL_NOT while (true) {
        u32 q[NT][D / 16][2];
        Slopes slopes;
        if (more) { // what it reads first is on its way while the segment before it is finished
            reader.begin(a, place.c, team.rank * WARPS + warp, share.log_team);
            UNROLL_NOT for (i32 i = 0; i < STAGES - 1; i++) reader.issue(i);
            load_queries(a, q, place.c.row, place.c.head, g0, G, lane);
            slopes.load(a, place.c, g0, G, lane);
        }
        if (ended) {
            finish(a, sh, rings, counters, runs, done, team, rounds, g0, G);
            if (!more) break;
            reads_end();
            __syncthreads(); // the last stages of the rings may be filled again
        }
        if (!more) break;
        State s;
        attend(reader, q, a, slopes, s);
        keep(sh, rings, warp, lane, s);
        const Cursor& c = place.c;
        const i32 count = KIND == STREAM_K ? 1 : pieces(c.n, c.size), tiles = c.end - c.t;
        done = {c.row,
                c.head,
                c.n,
                tiles,
                KIND == STREAM_K ? tiles == c.n : count == 1,
                place.at - c.t,
                KIND == STREAM_K ? 2 * i64(place.run) + place.opened : c.cut + i64(c.head) * count + c.piece};
        ended = true;
        place.opened = true;
        place.at += tiles;
        __syncthreads();
        more = place.at < place.stop;
        if (more) next_segment(a, place.c, param, place.stop - place.at);
    }

    if (KIND == STREAM_K && (SCANNED || batch.rows < a.B)) { // rows without keys
        UNROLL_NOT for (i32 b = blockIdx.x; b < a.B; b += programs) {
            if (row_at(a, b).n) continue;
            UNROLL_NOT for (i32 x = thread; x < a.KH * vectors; x += THREADS) {
                const i32 query = x / vectors * a.G + g0 + x % vectors / VECTORS;
                store(a, b, query, x % VECTORS * 4, {make_float4(0, 0, 0, 0), NOTHING, 0});
            }
        }
    }
    if (rounds == 0) cluster_wait();
}
