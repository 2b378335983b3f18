// What schedules of transfers are told of a layer, and which placements of its replicas are legal.

#pragma once

#include <cstdint>

#include "xla_ffi/team/team.h"

namespace topoep {

// One rank's part of a layer.
struct RankLayer {
  int32_t rank;
  int32_t num_ranks;
  int32_t num_slots;
  int32_t mains_per_rank;
  int64_t row_bytes;  // of an expert, or of its gradient, in the callers' arrays
};

enum class Flaw : int32_t {
  kNone,
  kRange,  // the expert is not in [-1, E)
  kOwn,    // it is a main of the rank
  kTwice,  // a later slot of the rank holds it, too
};

// What is wrong with entry i of slot_expert [R, N].
TOPOEP_BODY inline Flaw FlawOf(const RankLayer& layer, const int32_t* slot_expert, int32_t i) {
  const int32_t expert = slot_expert[i];
  const int32_t rank = i / layer.num_slots;
  if (expert < -1 || expert >= layer.num_ranks * layer.mains_per_rank) return Flaw::kRange;
  if (expert < 0) return Flaw::kNone;
  if (expert / layer.mains_per_rank == rank) return Flaw::kOwn;
  for (int32_t other = i + 1; other < (rank + 1) * layer.num_slots; ++other) {
    if (slot_expert[other] == expert) return Flaw::kTwice;
  }
  return Flaw::kNone;
}

}  // namespace topoep
