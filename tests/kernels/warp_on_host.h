// A warp of 32 threads of the host, so that the Hopper kernel's scans run without a GPU. For list_segments.cpp alone.
#pragma once

#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

inline std::barrier<> meeting(32);
inline long long exchange[32];
inline thread_local int lane_of_thread;

inline int __ldg(const int* p) { return *p; }
inline long long __ldg(const long long* p) { return *p; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

// Every lane gives a value; `take` reads what all gave.
template <class Value, class Take> auto collective(Value mine, Take take) {
    exchange[lane_of_thread] = static_cast<long long>(mine);
    meeting.arrive_and_wait();
    auto result = take();
    meeting.arrive_and_wait();
    return result;
}
template <class Value> Value __shfl_sync(unsigned, Value x, int from) {
    return collective(x, [&] { return static_cast<Value>(exchange[from & 31]); });
}
template <class Value> Value __shfl_up_sync(unsigned, Value x, int by) {
    const int from = lane_of_thread - by;
    return collective(x, [&] { return from < 0 ? x : static_cast<Value>(exchange[from]); });
}
template <class Value> Value __shfl_xor_sync(unsigned, Value x, int by) {
    return collective(x, [&] { return static_cast<Value>(exchange[lane_of_thread ^ by]); });
}
inline unsigned __ballot_sync(unsigned, bool x) {
    return collective(x, [] {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++) bits |= unsigned(exchange[i] != 0) << i;
        return bits;
    });
}
inline int __reduce_add_sync(unsigned, int x) {
    return collective(x, [] {
        long long sum = 0;
        for (long long each : exchange) sum += each;
        return static_cast<int>(sum);
    });
}
inline int __reduce_max_sync(unsigned, int x) {
    return collective(x, [] { return static_cast<int>(*std::max_element(exchange, exchange + 32)); });
}
