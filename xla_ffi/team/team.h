// Who runs a kernel body: one thread, several threads, or a CUDA block. A body is a template over its Team and reaches
// the lanes only through the members below, so that every team computes the same bits.
//
//   size()                        lanes
//   ForEach(n, f)                 f(i) for i in 0..n-1, dealt to the lanes; no order, no barrier. For equal n item i
//                                 goes to the same lane every time; nothing is promised of the lanes elsewhere
//   Sync()                        barrier: what was written before is seen after
//   Add(target, value)            atomic; integer sums do not depend on the order
//   ArgMax(n, key)                lane-uniform Best over key(i); contains barriers
//   ArgMaxEach(segments, n, key, then)
//                                 then(s, best over key(s, i)) once for each segment; ends with a barrier. Segments run
//                                 side by side: key(s, i) must not read what then(t, ..) of another segment writes
//   ScanEach(segments, n, value, result)
//                                 result[s * n + i] = sum of value(s, k) over k < i; ends with a barrier
//   Single(f)                     f() on one lane; no barrier
//
// A body must be uniform: every lane makes the same calls in the same order. One Sync(), ArgMax(), ArgMaxEach() or
// ScanEach() is one dependent step.

#pragma once

#include <cstdint>
#include <limits>

// A stage is a body that is compiled once for its team, not into each of its callers: nvcc would copy what has barriers
// and loops into ever larger functions.
#if defined(__CUDACC__)
#define TOPOEP_BODY __host__ __device__
#define TOPOEP_STAGE __host__ __device__ __noinline__
#else
#define TOPOEP_BODY
#define TOPOEP_STAGE
#endif

namespace topoep {

// Key of an index that must not win; a Best with this key found nothing.
inline constexpr int64_t kNoKey = std::numeric_limits<int64_t>::min();

struct Best {
  int64_t key = kNoKey;
  int32_t index = std::numeric_limits<int32_t>::max();

  TOPOEP_BODY bool Found() const { return key != kNoKey; }
};

// The larger key; the smaller index on a tie.
TOPOEP_BODY inline Best Better(Best a, Best b) {
  return a.key > b.key || (a.key == b.key && a.index <= b.index) ? a : b;
}

// The best of key(i) for i = first, first + step, .. below n.
template <class F>
TOPOEP_BODY Best BestOf(int32_t first, int32_t step, int32_t n, F key) {
  Best best;
  for (int32_t i = first; i < n; i += step) {
    const int64_t value = key(i);
    if (value > best.key) best = Best{value, i};
  }
  return best;
}

// One lane.
class SerialTeam {
 public:
  TOPOEP_BODY int32_t size() const { return 1; }

  template <class F>
  TOPOEP_BODY void ForEach(int32_t n, F f) {
    for (int32_t i = 0; i < n; ++i) f(i);
  }

  TOPOEP_BODY void Sync() {}

  template <class T>
  TOPOEP_BODY void Add(T* target, T value) {
    *target += value;
  }

  template <class F>
  TOPOEP_BODY Best ArgMax(int32_t n, F key) {
    return BestOf(0, 1, n, key);
  }

  template <class F, class Then>
  TOPOEP_BODY void ArgMaxEach(int32_t segments, int32_t n, F key, Then then) {
    for (int32_t s = 0; s < segments; ++s) {
      then(s, ArgMax(n, [&](int32_t i) { return key(s, i); }));
    }
  }

  template <class F>
  TOPOEP_BODY void ScanEach(int32_t segments, int32_t n, F value, int64_t* result) {
    for (int32_t s = 0; s < segments; ++s) {
      int64_t sum = 0;
      for (int32_t i = 0; i < n; ++i) {
        *result++ = sum;
        sum += value(s, i);
      }
    }
  }

  template <class F>
  TOPOEP_BODY void Single(F f) {
    f();
  }
};

}  // namespace topoep
