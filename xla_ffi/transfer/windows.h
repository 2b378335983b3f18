// Sizes and places inside the symmetric windows.

#pragma once

#include <array>
#include <cstdint>

#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/team.h"
#include "xla_ffi/transfer/fabric.h"

namespace topoep {

inline constexpr int64_t kGrain = 16;  // bytes; bulk copies start and end at its multiples

TOPOEP_BODY inline int64_t RoundDown(int64_t bytes) { return bytes / kGrain * kGrain; }
TOPOEP_BODY inline int64_t RoundUp(int64_t bytes) { return RoundDown(bytes + kGrain - 1); }

struct Range {
  int64_t begin;
  int64_t end;

  TOPOEP_BODY int64_t Size() const { return end - begin; }
};

// Part `index` of `count` equal parts of `bytes`, cut at grains: as topoep_jax/plan/pulls.py slices an expert, each cut
// rounded down to its grain.
TOPOEP_BODY inline Range PartOf(int64_t bytes, int64_t index, int64_t count) {
  const int64_t end = index + 1 == count ? bytes : RoundDown(bytes * (index + 1) / count);
  return {RoundDown(bytes * index / count), end};
}

TOPOEP_BODY inline Range PartOf(Range bytes, int64_t index, int64_t count) {
  const Range part = PartOf(bytes.Size(), index, count);
  return {bytes.begin + part.begin, bytes.begin + part.end};
}

TOPOEP_BODY inline Range Intersection(Range a, Range b) {
  const int64_t begin = Max(a.begin, b.begin);
  return {begin, Max(begin, Min(a.end, b.end))};
}

// Bytes between stripes of experts that are spread over `ranks`: no slice is longer.
TOPOEP_BODY inline int64_t StripePitch(int64_t pitch, int32_t ranks) { return RoundUp(pitch / ranks) + kGrain; }

// What the windows of a group are made for.
struct WindowShape {
  int32_t num_ranks;
  int32_t mains_per_rank;
  int32_t num_slots;
  int32_t smallest_domain;  // ranks of it
  int32_t largest_domain;
  bool striped;           // Pulls::kStriped or kBest: stripes are kept
  int64_t expert_bytes;   // one expert's parameters
  int64_t staging_bytes;  // of both halves together
  int64_t bounce_bytes;   // as the fabric asks

  TOPOEP_BODY int64_t Pitch() const { return RoundUp(expert_bytes); }

  // Replicas at a time, over all ranks.
  TOPOEP_BODY int64_t NumReplicas() const { return int64_t{num_ranks} * num_slots; }

  // Bytes of each of the two halves of the staging.
  TOPOEP_BODY int64_t HalfBytes() const { return RoundDown(staging_bytes / 2); }

  TOPOEP_BODY int64_t StripesBytes() const {
    if (!striped) return 0;
    int64_t most = 0;
    for (int32_t ranks = smallest_domain; ranks <= largest_domain; ++ranks) {
      most = Max(most, Min(int64_t{mains_per_rank} * ranks, NumReplicas()) * StripePitch(Pitch(), ranks));
    }
    return most;
  }

  // Of every Window, in their order.
  std::array<int64_t, kNumWindows> Bytes() const {
    const int64_t signals = RoundUp(int64_t{kNumWords} * num_ranks * static_cast<int64_t>(sizeof(int64_t)));
    return {mains_per_rank * Pitch(), num_slots * Pitch(), StripesBytes(), 2 * HalfBytes(), signals, bounce_bytes};
  }

  // The least staging that any plan can use: a grain for every replica, twice.
  TOPOEP_BODY int64_t LeastStaging() const { return 2 * kGrain * Max(NumReplicas(), 1); }
};

// The shape for replicas of `problem`, whose parameters are `expert_bytes` long. On the host.
inline WindowShape ShapeOf(const Problem& problem, int64_t expert_bytes, int64_t staging_bytes, int64_t bounce_bytes) {
  const DomainTable table(problem);
  int32_t smallest = problem.num_ranks;
  int32_t largest = 1;
  for (int32_t d = 0; d < problem.num_domains; ++d) {
    const int32_t size = table.View().Size(d);
    if (size > 0 && size < smallest) smallest = size;
    if (size > largest) largest = size;
  }
  const bool striped = problem.cost.pulls == Pulls::kStriped || problem.cost.pulls == Pulls::kBest;
  return {problem.num_ranks, problem.MainsPerRank(), problem.num_slots, smallest,    largest,
          striped,           expert_bytes,           staging_bytes,     bounce_bytes};
}

}  // namespace topoep
