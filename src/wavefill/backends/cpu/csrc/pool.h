// Runs one function on several threads at once.
#pragma once

namespace wf {

// Calls fn(arg) on up to `threads` threads, the caller's included, and returns when all of them have.
// fn must share its work out by itself (an atomic counter), since fewer threads may come.
void run_parallel(int threads, void (*fn)(void *), void *arg);

// "openmp" when the process's own OpenMP team is used, "threads" for the built-in pool.
const char *pool_name();

}  // namespace wf
