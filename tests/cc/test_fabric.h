// A HostFabric that makes trouble: random delays, a rank that stops, and faults of the protocol that tests must catch.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/native/host_fabric.h"

namespace topoep {

inline const char* WordName(int32_t word) {
  constexpr const char* kNames[] = {"open", "ready", "arrived", "done", "credit", "pushed"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == kNumWords, "a name for every word");
  return kNames[word];
}

inline std::string CounterName(int32_t counter) {
  if (counter == kPublished) return "published";
  if (counter < kHopEnded) return "put_in_hop_" + std::to_string(counter - kPutInHop);
  if (counter < kPullEnded) return "hop_ended_" + std::to_string(counter - kHopEnded);
  if (counter == kPullEnded) return "pull_ended";
  if (counter < kPieceAdded) return "piece_sent_" + std::to_string(counter - kPieceSent);
  if (counter < kPushEnded) return "piece_added_" + std::to_string(counter - kPieceAdded);
  return "push_ended";
}

// A put that has left and not landed.
struct Parcel {
  char* target;
  std::vector<char> bytes;
};

// What goes wrong; nothing by default. Shared by all workers, set before they run.
struct Trouble {
  bool delays = false;
  bool late_puts = false;     // puts land with their rank's next signal to the peer; takes a lock, which hides races
  int32_t stopped_rank = -1;  // makes no call any more after `calls_before_stop`
  int64_t calls_before_stop = 0;
  std::string fault;  // "drop_signal:WORD", "skip_wait:WORD", "early_arrive:COUNTER" or "skip_flush:FILE:LINE"

  std::atomic<int64_t> calls_of_stopped{0};
  std::atomic<int64_t> faults{0};  // calls in which `fault` was at work
  std::mutex mutex;
  std::map<std::pair<int32_t, int32_t>, std::vector<Parcel>> under_way;  // (from, to)
  std::map<std::string, int64_t> visits;  // how often a worker came to where each fault can be, if `records`
  bool records = false;                   // takes a lock, which hides races
};

template <class Orders = HostOrders>
class TestFabric {
 public:
  TestFabric(HostWorld& world, Trouble& trouble, int32_t rank, int32_t worker)
      : world_(world), fabric_(world, rank, worker), trouble_(trouble), random_(rank * 1000003u + worker * 7919u + 1) {}

  int32_t Rank() const { return fabric_.Rank(); }
  int32_t NumRanks() const { return fabric_.NumRanks(); }
  int32_t Worker() const { return fabric_.Worker(); }
  int32_t NumWorkers() const { return fabric_.NumWorkers(); }
  const RankState& State() const { return fabric_.State(); }
  bool CanGet(int32_t peer) const { return fabric_.CanGet(peer); }
  bool CanGetAll() const { return fabric_.CanGetAll(); }
  char* Local(Window window, int64_t at) { return fabric_.Local(window, at); }

  void Get(int32_t peer, Window from, int64_t from_at, Window to, int64_t to_at, int64_t bytes) {
    Pause();
    fabric_.Get(peer, from, from_at, to, to_at, bytes);
  }
  void Put(int32_t peer, const void* source, Window to, int64_t to_at, int64_t bytes) {
    Pause();
    if (trouble_.late_puts) {
      puts_.push_back({peer, world_.At(peer, to) + to_at, static_cast<const char*>(source), bytes});
    } else {
      fabric_.Put(peer, source, to, to_at, bytes);
    }
  }
  void Copy(void* target, const void* source, int64_t bytes) { fabric_.Copy(target, source, bytes); }

  void Flush(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    Pause();
    const char* name = std::strrchr(file, '/');
    if (At("skip_flush:" + std::string(name == nullptr ? file : name + 1) + ":" + std::to_string(line))) return;
    if (Stopped()) return;
    fabric_.Flush();
    if (!trouble_.late_puts) return;
    const std::lock_guard<std::mutex> lock(trouble_.mutex);
    for (const LatePut& put : puts_) {
      trouble_.under_way[{Rank(), put.peer}].push_back({put.target, {put.source, put.source + put.bytes}});
    }
    puts_.clear();
  }

  bool Arrive(Counter counter) {
    Pause();
    const bool early = At("early_arrive:" + CounterName(counter));
    if (Stopped()) return false;
    if (!early) return fabric_.Arrive(counter);
    fabric_.Arrive(counter);
    return Worker() == 0;
  }

  template <class F>
  void Signal(Word word, F value) {
    Pause();
    if (At(std::string("drop_signal:") + WordName(word)) || Stopped()) return;
    if (trouble_.late_puts) {
      for (int32_t peer = 0; peer < NumRanks(); ++peer) {
        if (value(peer) != 0) Land(peer);
      }
    }
    fabric_.Signal(word, value);
  }

  bool Wait(Word word, int32_t peer, int64_t value) {
    if (Stopped()) return false;
    return At(std::string("skip_wait:") + WordName(word) + (peer == Rank() ? "_self" : "")) ||
           fabric_.Wait(word, peer, value);
  }

  template <class F>
  bool WaitAll(Word word, F value) {
    if (Stopped()) return false;
    return At(std::string("skip_wait:") + WordName(word)) || fabric_.WaitAll(word, value);
  }

  template <class F>
  void ForEach(int32_t n, F f) {
    Pause();
    fabric_.ForEach(n, f);
  }

 private:
  struct LatePut {
    int32_t peer;
    char* target;
    const char* source;
    int64_t bytes;
  };

  void Land(int32_t peer) {
    const std::lock_guard<std::mutex> lock(trouble_.mutex);
    std::vector<Parcel>& parcels = trouble_.under_way[{Rank(), peer}];
    for (const Parcel& parcel : parcels) std::memcpy(parcel.target, parcel.bytes.data(), parcel.bytes.size());
    parcels.clear();
  }

  // Whether the place has the fault.
  bool At(const std::string& place) {
    if (trouble_.records) {
      const std::lock_guard<std::mutex> lock(trouble_.mutex);
      ++trouble_.visits[place];
    }
    if (trouble_.fault.empty() || trouble_.fault != place) return false;
    trouble_.faults.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  bool Stopped() {
    if (Rank() != trouble_.stopped_rank) return false;
    return trouble_.calls_of_stopped.fetch_add(1, std::memory_order_relaxed) >= trouble_.calls_before_stop;
  }

  void Pause() {
    if (!trouble_.delays) return;
    random_ = random_ * 1664525u + 1013904223u;
    const uint32_t draw = random_ >> 20;
    if (draw % 8 == 0) std::this_thread::yield();
    if (draw % 61 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw % 300));
  }

  HostWorld& world_;
  HostFabric<Orders> fabric_;
  Trouble& trouble_;
  std::vector<LatePut> puts_;  // until the next Flush()
  uint32_t random_;
};

}  // namespace topoep
