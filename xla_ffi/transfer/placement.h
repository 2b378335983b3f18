// Which placements of replicas are legal: what schedules of transfers rely on.

#ifndef TOPOEP_XLA_FFI_TRANSFER_PLACEMENT_H_
#define TOPOEP_XLA_FFI_TRANSFER_PLACEMENT_H_

#include <cstdint>

#include "xla_ffi/team/team.h"

namespace topoep {

enum class Flaw : int32_t {
  kNone,
  kRange,  // the expert is not in [-1, E)
  kOwn,    // it is a main of the rank
  kTwice,  // a later slot of the rank holds it, too
};

// What is wrong with entry i of slot_expert [R, N], with `num_mains` experts on each rank.
TOPOEP_BODY inline Flaw FlawOf(const int32_t* slot_expert, int32_t num_ranks, int32_t num_slots, int32_t num_mains,
                               int32_t i) {
  const int32_t expert = slot_expert[i];
  const int32_t rank = i / num_slots;
  if (expert < -1 || expert >= num_ranks * num_mains) return Flaw::kRange;
  if (expert < 0) return Flaw::kNone;
  if (expert / num_mains == rank) return Flaw::kOwn;
  for (int32_t other = i + 1; other < (rank + 1) * num_slots; ++other) {
    if (slot_expert[other] == expert) return Flaw::kTwice;
  }
  return Flaw::kNone;
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_TRANSFER_PLACEMENT_H_
