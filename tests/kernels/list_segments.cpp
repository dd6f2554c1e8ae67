// The segments that the Hopper kernel's programs find, as the kernel finds them; see test_cuda_schedule.py.
#include "warp_on_host.h"

#include "cursor.cuh"

struct Args {
    const i32* seq;
    const i64* before;
    i32 B, KH, window, limit, param, rule;
};

#include "scan.cuh"

// For each worker its segments as row, head, first and last tile, place: out [workers, most, 5], counts [workers].
// Units count `opening` tiles more than they have, as where the kernel evens out what further segments cost.
extern "C" void list_segments(const i32* seq, const i64* before, i32 B, i32 KH, i32 window, i32 limit, i32 param,
                              i32 rule, i32 workers, i32 opening, i32 most_segments, i64* out, i32* counts) {
    const Args a = {seq, before, B, KH, window, limit, param, rule};
    auto warp = [&](i32 lane) {
        lane_of_thread = lane;
        const Batch batch = batch_of(a, lane);
        const i32 cut = KIND == SPLITS ? SCANNED ? i32(__ldg(a.before + 2 * B + 2))
                                                 : splits(batch.rows, batch.longest, KH, workers, param, rule)
                                       : param;
        const Tiles tiles = batch.tiles + (opening ? Tiles(batch.rows) * KH * opening : 0);
        const Runs runs(tiles, i32(least(tiles, Tiles(workers))));
        for (i32 run = 0; run < runs.count; run++) {
            Tiles at = runs.cut(run);
            const Tiles stop = runs.cut(run + 1);
            Cursor c;
            if (at < stop) c = cursor_at(a, batch, at, stop, cut, opening, lane);
            i32 n = 0;
            while (at < stop) {
                i64* to = out + (i64(run) * most_segments + n++) * 5;
                if (lane == 0) {
                    to[0] = c.row, to[1] = c.head, to[2] = c.first + c.t, to[3] = c.first + c.end;
                    to[4] = KIND == STREAM_K ? runs.owner(at) : c.cut + i64(c.head) * pieces(c.n, c.size) + c.piece;
                }
                at += c.end - c.t;
                if (at < stop) next_segment(a, c, cut, stop - at);
            }
            if (lane == 0) counts[run] = n;
        }
    };
    std::vector<std::thread> lanes;
    for (i32 lane = 0; lane < 32; lane++) lanes.emplace_back(warp, lane);
    for (auto& each : lanes) each.join();
}
