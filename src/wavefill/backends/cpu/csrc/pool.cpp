// torch keeps an OpenMP team whose idle threads spin for a while after each of its operators. A second pool would
// fight that team for the cores between every two operators of a model, so this one borrows it: GOMP_parallel is the
// stable entry point of libgomp, which LLVM's runtime exports too. Where no such runtime is loaded, a plain pool serves.
#include "pool.h"

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
#define WF_POSIX 1
#endif

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace wf {

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

static GompParallel find_openmp() {
#ifdef WF_POSIX
  return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#else
  return nullptr;
#endif
}

// Looked up until found: torch may be imported after this module.
static GompParallel openmp() {
  static GompParallel found = nullptr;
  if (!found) found = find_openmp();
  return found;
}

namespace {

class Pool {
 public:
  void run(int threads, void (*fn)(void *), void *arg) {
    std::unique_lock<std::mutex> whole(call_);  // one call at a time; callers queue
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while ((int)workers_.size() < threads - 1) {
        const int index = (int)workers_.size();
        workers_.emplace_back([this, index, seen = turn_] { loop(index, seen); });
        workers_.back().detach();
      }
      fn_ = fn;
      arg_ = arg;
      wanted_ = threads - 1;
      running_ = threads - 1;
      ++turn_;
    }
    start_.notify_all();
    fn(arg);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void loop(int index, unsigned long seen) {
    for (;;) {
      void (*fn)(void *);
      void *arg;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        start_.wait(lock, [&] { return turn_ != seen; });
        seen = turn_;
        if (index >= wanted_) continue;
        fn = fn_;
        arg = arg_;
      }
      fn(arg);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex call_, mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> workers_;
  void (*fn_)(void *) = nullptr;
  void *arg_ = nullptr;
  int wanted_ = 0, running_ = 0;
  unsigned long turn_ = 0;
};

// Never destroyed: its detached threads may outlive static destructors. A forked child has none of the parent's
// threads, so it starts a pool of its own.
Pool *pool = nullptr;
std::mutex pool_mutex;
#ifdef WF_POSIX
pid_t pool_owner = 0;
#endif

Pool &own_pool() {
  std::lock_guard<std::mutex> lock(pool_mutex);
#ifdef WF_POSIX
  if (pool_owner != getpid()) {
    pool = nullptr;
    pool_owner = getpid();
  }
#endif
  if (!pool) pool = new Pool;
  return *pool;
}

}  // namespace

void run_parallel(int threads, void (*fn)(void *), void *arg) {
  if (threads <= 1) return fn(arg);
  if (GompParallel gomp = openmp()) return gomp(fn, arg, (unsigned)threads, 0);
  own_pool().run(threads, fn, arg);
}

const char *pool_name() { return openmp() ? "openmp" : "threads"; }

}  // namespace wf
