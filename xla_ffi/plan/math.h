// Small arithmetic for bodies on any team, where std::min() and its like cannot be called without flags of the
// compiler.

#pragma once

#include <cstdint>

#include "xla_ffi/team/team.h"

namespace topoep {

inline constexpr int64_t kPermille = 1000;

TOPOEP_BODY inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
TOPOEP_BODY inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
TOPOEP_BODY inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }  // of a >= 0

// Whether (a, then_a) comes before (b, then_b).
TOPOEP_BODY inline bool IsLess(int64_t a, int64_t b, int64_t then_a, int64_t then_b) {
  return a < b || (a == b && then_a < then_b);
}

// Of value(i) for i in 0..n-1.
template <class Value>
TOPOEP_BODY int64_t Sum(int32_t n, Value value) {
  int64_t sum = 0;
  for (int32_t i = 0; i < n; ++i) sum += value(i);
  return sum;
}

// The first of 0..n-1 that takes part and is better than all others that do, or the lowest of equals; -1: none does.
template <class TakesPart, class IsBetter>
TOPOEP_BODY int32_t FindFirst(int32_t n, TakesPart takes_part, IsBetter is_better) {
  int32_t best = -1;
  for (int32_t i = 0; i < n; ++i) {
    if (takes_part(i) && (best < 0 || is_better(i, best))) best = i;
  }
  return best;
}

}  // namespace topoep
