// A team of host threads: for tests under ThreadSanitizer, and for plans of one candidate on several cores.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "xla_ffi/team/team.h"

namespace topoep {

// What the lanes of one team share.
class ThreadTeamState {
 public:
  explicit ThreadTeamState(int32_t size) : size_(size), bests_(size) {}

  int32_t size() const { return size_; }
  std::vector<Best>& bests() { return bests_; }

  // Orders what lanes wrote before with what they read after, and nothing else: a lock or a condition variable would
  // also order lanes that leave one barrier with those that have come to the next, and hide a missing barrier from a
  // sanitizer.
  void Wait() {
    const int64_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    while (turn_.load(std::memory_order_acquire) == turn) std::this_thread::yield();
  }

 private:
  int32_t size_;
  std::vector<Best> bests_;
  std::atomic<int32_t> arrived_{0};
  std::atomic<int64_t> turn_{0};
};

// One lane of the team; Self derives from it and has the barrier, Sync(). Only ForEach() promises which lane takes an
// item: elsewhere another lane does, so that a body that relies on the same one is found out.
template <class Self>
class ThreadTeamWith {
 public:
  ThreadTeamWith(ThreadTeamState& state, int32_t lane) : state_(state), lane_(lane) {}

  int32_t size() const { return state_.size(); }

  template <class F>
  void ForEach(int32_t n, F f) {
    for (int32_t i = lane_; i < n; i += size()) f(i);
  }

  template <class T>
  void Add(T* target, T value) {
    __atomic_fetch_add(target, value, __ATOMIC_RELAXED);
  }

  template <class F>
  Best ArgMax(int32_t n, F key) {
    state_.bests()[lane_] = BestOf(NextLane(), size(), n, key);
    Barrier().Sync();
    Best best;
    for (const Best& other : state_.bests()) best = Better(best, other);
    Barrier().Sync();
    return best;
  }

  template <class F, class Then>
  void ArgMaxEach(int32_t segments, int32_t n, F key, Then then) {
    for (int32_t s = NextLane(); s < segments; s += size()) {
      then(s, BestOf(0, 1, n, [&](int32_t i) { return key(s, i); }));
    }
    Barrier().Sync();
  }

  template <class F>
  void ScanEach(int32_t segments, int32_t n, F value, int64_t* result) {
    for (int32_t s = NextLane(); s < segments; s += size()) {
      SerialTeam().ScanEach(1, n, [&](int32_t, int32_t i) { return value(s, i); }, result + int64_t{s} * n);
    }
    Barrier().Sync();
  }

  template <class F>
  void Single(F f) {
    if (NextLane() == 0) f();
  }

 protected:
  ThreadTeamState& state_;
  int32_t lane_;

 private:
  int32_t NextLane() const { return (lane_ + 1) % size(); }
  Self& Barrier() { return static_cast<Self&>(*this); }
};

class ThreadTeam : public ThreadTeamWith<ThreadTeam> {
 public:
  using ThreadTeamWith::ThreadTeamWith;

  void Sync() { state_.Wait(); }
};

// body(team) on `size` threads, each with a lane of its own; returns when all are done.
template <class Team = ThreadTeam, class Body>
void RunThreads(int32_t size, Body body) {
  ThreadTeamState state(size);
  std::vector<std::thread> threads;
  threads.reserve(size);
  for (int32_t lane = 0; lane < size; ++lane) {
    threads.emplace_back([&state, &body, lane] {
      Team team(state, lane);
      body(team);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace topoep
