// A CUDA block as a team: every thread is a lane. Keys and sums are reduced inside warps by registers, between warps
// through kNumPartials words of shared memory.
//
//   member       barriers
//   ForEach      none
//   Sync         one
//   Add          none
//   ArgMax       one: it orders the keys' reads before whatever follows, and nothing else
//   ArgMaxEach   one at its end; one more where several warps share a segment
//   ScanEach     one at its end; one more where several warps share a segment
//   Single       none
//
// Where there are fewer segments than warps, each segment gets an equal share of the warps. Two uses of the partials in
// a row take different halves, so that a warp may read its half while others fill the next.

#pragma once

#include <cstdint>

#include "xla_ffi/team/team.h"

namespace topoep {

// kThreads is the size of the block.
template <int32_t kThreads>
class BlockTeam {
  static constexpr int32_t kLanesOfWarp = 32;
  static constexpr int32_t kWarps = kThreads / kLanesOfWarp;
  static constexpr uint32_t kAll = 0xffffffffu;
  static_assert(kThreads % kLanesOfWarp == 0 && kWarps <= kLanesOfWarp, "a block has 1 to 32 whole warps");

 public:
  // Shared memory of the block.
  struct Partials {
    Best of_warp[2][kWarps];
  };

  __device__ explicit BlockTeam(Partials& partials) : partials_(partials) {}

  __device__ int32_t size() const { return kThreads; }

  template <class F>
  __device__ void ForEach(int32_t n, F f) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n; i += kThreads) f(i);
  }

  __device__ void Sync() { __syncthreads(); }

  __device__ void Add(int32_t* target, int32_t value) { atomicAdd(target, value); }
  __device__ void Add(int64_t* target, int64_t value) {
    // Two's complement: adding without a sign is adding with one.
    atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(value));
  }

  template <class F>
  __device__ Best ArgMax(int32_t n, F key) {
    const Best of_warp = BestOfWarp(BestOf(static_cast<int32_t>(threadIdx.x), kThreads, n, key));
    Best* partials = NextPartials();
    if (Lane() == 0) partials[Warp()] = of_warp;
    __syncthreads();
    return BestOfPartials(partials, kWarps);
  }

  template <class F, class Then>
  __device__ void ArgMaxEach(int32_t segments, int32_t n, F key, Then then) {
    const int32_t share = WarpsOfSegment(segments, n);
    if (share == 1) {
      for (int32_t s = Warp(); s < segments; s += kWarps) {
        const Best best = BestOfWarp(BestOf(Lane(), kLanesOfWarp, n, [&](int32_t i) { return key(s, i); }));
        if (Lane() == 0) then(s, best);
      }
    } else {
      const int32_t s = Warp() / share;
      Best* partials = NextPartials();
      if (s < segments) {
        const int32_t lane = static_cast<int32_t>(threadIdx.x) - s * share * kLanesOfWarp;
        const Best of_warp = BestOfWarp(BestOf(lane, share * kLanesOfWarp, n, [&](int32_t i) { return key(s, i); }));
        if (Lane() == 0) partials[Warp()] = of_warp;
      }
      __syncthreads();
      if (s < segments && Warp() % share == 0) {
        const Best best = BestOfPartials(partials + Warp(), share);
        if (Lane() == 0) then(s, best);
      }
    }
    __syncthreads();
  }

  template <class F>
  __device__ void ScanEach(int32_t segments, int32_t n, F value, int64_t* result) {
    const int32_t share = WarpsOfSegment(segments, n);
    if (share == 1) {
      for (int32_t s = Warp(); s < segments; s += kWarps) {
        const Run run(0, n);
        Evaluate(s, 0, n, value, result + int64_t{s} * n);
        const int64_t mine = run.Sum(result + int64_t{s} * n);
        run.Scan(SumOfLanes(mine) - mine, result + int64_t{s} * n);
      }
    } else {
      const int32_t s = Warp() / share;
      const int32_t width = (n + share - 1) / share;
      const int32_t begin = Warp() % share * width < n ? Warp() % share * width : n;
      const int32_t end = begin + width < n ? begin + width : n;
      const Run run(begin, end);
      int64_t mine = 0;
      int64_t through = 0;  // this lane
      Best* partials = NextPartials();
      if (s < segments) {
        Evaluate(s, begin, end, value, result + int64_t{s} * n);
        mine = run.Sum(result + int64_t{s} * n);
        through = SumOfLanes(mine);
        if (Lane() == kLanesOfWarp - 1) partials[Warp()].key = through;
      }
      __syncthreads();
      if (s < segments) {
        for (int32_t warp = s * share; warp < Warp(); ++warp) through += partials[warp].key;
        run.Scan(through - mine, result + int64_t{s} * n);
      }
    }
    __syncthreads();
  }

  template <class F>
  __device__ void Single(F f) {
    if (threadIdx.x == 0) f();
  }

 private:
  __device__ static int32_t Lane() { return static_cast<int32_t>(threadIdx.x) % kLanesOfWarp; }
  __device__ static int32_t Warp() { return static_cast<int32_t>(threadIdx.x) / kLanesOfWarp; }

  // Warps that share a segment: no more than have an item for each lane.
  __device__ static int32_t WarpsOfSegment(int32_t segments, int32_t n) {
    if (segments == 0) return 1;
    const int32_t most = (n + kLanesOfWarp - 1) / kLanesOfWarp;
    const int32_t share = kWarps / segments < most ? kWarps / segments : most;
    return share < 1 ? 1 : share;
  }

  __device__ Best* NextPartials() {
    half_ ^= 1;
    return partials_.of_warp[half_];
  }

  // The best of all lanes, to each of them: of the largest upper halves of keys those with the largest lower half, of
  // these the lowest index.
  __device__ static Best BestOfWarp(Best mine) {
    const int32_t high = static_cast<int32_t>(mine.key >> 32);
    const uint32_t low = static_cast<uint32_t>(mine.key);
    const int32_t best_high = __reduce_max_sync(kAll, high);
    const uint32_t best_low = __reduce_max_sync(kAll, high == best_high ? low : 0u);
    const bool is_best = high == best_high && low == best_low;
    const int32_t index = __reduce_min_sync(kAll, is_best ? mine.index : Best{}.index);
    return Best{static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(best_high)) << 32 | best_low), index};
  }

  __device__ static Best BestOfPartials(const Best* partials, int32_t count) {
    return BestOfWarp(Lane() < count ? partials[Lane()] : Best{});
  }

  // The sum of `value` over this lane and those below.
  __device__ static int64_t SumOfLanes(int64_t value) {
    for (int32_t distance = 1; distance < kLanesOfWarp; distance *= 2) {
      const int64_t below = __shfl_up_sync(kAll, value, distance);
      if (Lane() >= distance) value += below;
    }
    return value;
  }

  // out[i] = value(s, i) for begin <= i < end, neighbours on neighbouring lanes; the whole warp may read it.
  template <class F>
  __device__ static void Evaluate(int32_t s, int32_t begin, int32_t end, F& value, int64_t* out) {
    for (int32_t i = begin + Lane(); i < end; i += kLanesOfWarp) out[i] = value(s, i);
    __syncwarp();
  }

  // This lane's part of begin..end-1, without gaps.
  struct Run {
    __device__ Run(int32_t begin, int32_t end) {
      const int32_t length = (end - begin + kLanesOfWarp - 1) / kLanesOfWarp;
      first = begin + Lane() * length;
      last = first + length < end ? first + length : end;
    }

    __device__ int64_t Sum(const int64_t* values) const {
      int64_t sum = 0;
      for (int32_t i = first; i < last; ++i) sum += values[i];
      return sum;
    }

    // Replaces values by what comes before them, `before` all others.
    __device__ void Scan(int64_t before, int64_t* values) const {
      for (int32_t i = first; i < last; ++i) {
        const int64_t value = values[i];
        values[i] = before;
        before += value;
      }
    }

    int32_t first;
    int32_t last;  // exclusive
  };

  Partials& partials_;
  int32_t half_ = 0;  // of the partials in use, the same on every lane
};

}  // namespace topoep
