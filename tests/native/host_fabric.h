// A Fabric of host threads: windows on the heap, words that are atomics. For tests under ThreadSanitizer and for the
// host twins of the transfer kernels. As on the device, what was started need not have happened before Flush().

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/transfer/fabric.h"
#include "xla_ffi/transfer/windows.h"

namespace topoep {

// Pairs of ranks between which Get() works.
enum class Gets : int64_t { kNone = 0, kDomain = 1, kAll = 2 };

// What all ranks share: their windows, words and states.
class HostWorld {
 public:
  HostWorld(const WindowShape& shape, const int32_t* domain_of_rank, Gets gets, int32_t num_workers,
            std::chrono::nanoseconds timeout)
      : num_ranks_(shape.num_ranks),
        num_workers_(num_workers),
        domain_of_rank_(domain_of_rank),
        gets_(gets),
        timeout_(timeout),
        windows_(int64_t{num_ranks_} * kNumWindows),
        failures_(num_ranks_) {
    Arena measured;
    RankState(num_ranks_, measured);
    for (int32_t rank = 0; rank < num_ranks_; ++rank) {
      for (int32_t window = 0; window < kNumWindows; ++window) {
        windows_[int64_t{rank} * kNumWindows + window].reset(new char[shape.Bytes()[window]]);
      }
      std::memset(At(rank, kSignals), 0, shape.Bytes()[kSignals]);
      state_memory_.emplace_back(new char[measured.Used()]());
      Arena arena(state_memory_.back().get());
      states_.emplace_back(num_ranks_, arena);
    }
  }

  int32_t num_ranks() const { return num_ranks_; }
  int32_t num_workers() const { return num_workers_; }
  std::chrono::nanoseconds timeout() const { return timeout_; }
  char* At(int32_t rank, Window window) { return windows_[int64_t{rank} * kNumWindows + window].get(); }
  const RankState& state(int32_t rank) const { return states_[rank]; }
  bool CanGetAll() const { return gets_ == Gets::kAll; }
  bool CanGet(int32_t a, int32_t b) const {
    return CanGetAll() || (gets_ == Gets::kDomain && domain_of_rank_[a] == domain_of_rank_[b]);
  }

  // The first failure of a rank stays.
  void Fail(int32_t rank, Failure failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failures_[rank].failed == 0) failures_[rank] = failure;
  }
  Failure failure(int32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failures_[rank];
  }

 private:
  int32_t num_ranks_;
  int32_t num_workers_;
  const int32_t* domain_of_rank_;
  Gets gets_;
  std::chrono::nanoseconds timeout_;
  std::vector<std::unique_ptr<char[]>> windows_;
  std::vector<std::unique_ptr<char[]>> state_memory_;
  std::vector<RankState> states_;
  std::mutex mutex_;
  std::vector<Failure> failures_;
};

// The orders of the protocol's atomics. They are constants of a type: an order that is only known when the program runs
// is compiled as the strongest one, and then a test of a weaker one tests nothing.
struct HostOrders {
  static constexpr int kSignal = __ATOMIC_RELEASE;
  static constexpr int kWait = __ATOMIC_ACQUIRE;
  static constexpr int kArrive = __ATOMIC_ACQ_REL;
};

template <class Orders = HostOrders>
class HostFabric {
 public:
  HostFabric(HostWorld& world, int32_t rank, int32_t worker) : world_(world), rank_(rank), worker_(worker) {}

  int32_t Rank() const { return rank_; }
  int32_t NumRanks() const { return world_.num_ranks(); }
  int32_t Worker() const { return worker_; }
  int32_t NumWorkers() const { return world_.num_workers(); }
  const RankState& State() const { return world_.state(rank_); }
  bool CanGet(int32_t peer) const { return world_.CanGet(rank_, peer); }
  bool CanGetAll() const { return world_.CanGetAll(); }
  char* Local(Window window, int64_t at) { return world_.At(rank_, window) + at; }

  void Get(int32_t peer, Window from, int64_t from_at, Window to, int64_t to_at, int64_t bytes) {
    started_.push_back({world_.At(rank_, to) + to_at, world_.At(peer, from) + from_at, bytes});
  }
  void Put(int32_t peer, const void* source, Window to, int64_t to_at, int64_t bytes) {
    started_.push_back({world_.At(peer, to) + to_at, source, bytes});
  }
  void Copy(void* target, const void* source, int64_t bytes) { started_.push_back({target, source, bytes}); }

  void Flush() {
    for (const Move& move : started_) std::memcpy(move.target, move.source, move.bytes);
    started_.clear();
  }

  bool Arrive(Counter counter) {
    const int64_t before = __atomic_fetch_add(&State().arrivals[counter], int64_t{1}, Orders::kArrive);
    return (before + 1) % NumWorkers() == 0;
  }

  template <class F>
  void Signal(Word word, F value) {
    for (int32_t peer = 0; peer < NumRanks(); ++peer) {
      const int64_t sent = value(peer);
      if (sent != 0) __atomic_store_n(WordAt(peer, word, rank_), sent, Orders::kSignal);
    }
  }

  bool Wait(Word word, int32_t peer, int64_t value) {
    const int64_t* const at = WordAt(rank_, word, peer);
    for (int64_t turn = 0; __atomic_load_n(at, Orders::kWait) < value; ++turn) {
      if (turn < kBusyTurns) {
        std::this_thread::yield();
        continue;
      }
      const auto now = std::chrono::steady_clock::now();
      if (turn == kBusyTurns) deadline_ = now + world_.timeout();
      if (now > deadline_) {
        world_.Fail(rank_, {1, word, peer, value});
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

  template <class F>
  bool WaitAll(Word word, F value) {
    for (int32_t peer = 0; peer < NumRanks(); ++peer) {
      const int64_t wanted = value(peer);
      if (wanted != 0 && !Wait(word, peer, wanted)) return false;
    }
    return true;
  }

  template <class F>
  void ForEach(int32_t n, F f) {
    for (int32_t i = 0; i < n; ++i) f(i);
  }

 private:
  struct Move {
    void* target;
    const void* source;
    int64_t bytes;
  };

  static constexpr int64_t kBusyTurns = 50;

  int64_t* WordAt(int32_t rank, Word word, int32_t sender) {
    return reinterpret_cast<int64_t*>(world_.At(rank, kSignals)) + int64_t{word} * NumRanks() + sender;
  }

  HostWorld& world_;
  int32_t rank_;
  int32_t worker_;
  std::vector<Move> started_;
  std::chrono::steady_clock::time_point deadline_;
};

// "rank 3 waited 1 s for rank 5: its parameters of hop 1 (word kReady, pull 7)".
inline std::string Describe(int32_t rank, const Failure& failure, std::chrono::nanoseconds timeout) {
  const std::string step = std::to_string(StepOf(failure.value));
  std::string what;
  switch (failure.word) {
    case kOpen:
      what = "to enter the pull";
      break;
    case kReady:
      what = "to have what it sends in hop " + step;
      break;
    case kArrived:
      what = "to put its parameters of hop " + step;
      break;
    case kDone:
      what = "to have read this rank's parameters";
      break;
    case kCredit:
      what = "to take " + step + " pieces of gradients";
      break;
    case kPushed:
      what = "to put " + step + " pieces of gradients";
      break;
    default:
      what = "for word " + std::to_string(failure.word);
  }
  const bool push = failure.word == kCredit || failure.word == kPushed;
  return "rank " + std::to_string(rank) + " waited " +
         std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count()) + " ms for rank " +
         std::to_string(failure.peer) + " " + what + " (" + (push ? "push " : "pull ") +
         std::to_string(EpochOf(failure.value)) + ")";
}

}  // namespace topoep
