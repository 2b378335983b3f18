// One plan under construction; topoep_jax/plan/topoep/state.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// The plan under construction of one candidate.
struct State {
  TOPOEP_BODY State(int32_t* slot_expert_in, int32_t* quota_in) : slot_expert(slot_expert_in), quota(quota_in) {}
  TOPOEP_BODY State(const Context& context, Arena& arena)
      : slot_expert(arena.Take<int32_t>(int64_t{context.ranks} * context.slots)),
        quota(arena.Take<int32_t>(context.problem->NumQuotas())) {}

  TOPOEP_BODY int32_t* Quota(const Context& context, int32_t source, int32_t rank, int32_t instance) const {
    return quota + context.problem->QuotaAt(source, rank, instance);
  }
  // The expert of an instance, -1 for a free slot.
  TOPOEP_BODY int32_t ExpertOf(const Context& context, int32_t rank, int32_t instance) const {
    return instance < context.mains ? rank * context.mains + instance
                                    : slot_expert[rank * context.slots + instance - context.mains];
  }
  // The instance of an expert on a rank, or -1.
  TOPOEP_BODY int32_t InstanceOf(const Context& context, int32_t rank, int32_t expert) const {
    if (expert / context.mains == rank) return expert % context.mains;
    for (int32_t n = 0; n < context.slots; ++n) {
      if (slot_expert[rank * context.slots + n] == expert) return context.mains + n;
    }
    return -1;
  }
  TOPOEP_BODY int32_t FreeSlots(const Context& context, int32_t rank) const {
    return static_cast<int32_t>(
        Sum(context.slots, [&](int32_t n) { return slot_expert[rank * context.slots + n] < 0; }));
  }

  int32_t* slot_expert;  // [R, N], -1: free
  int32_t* quota;        // [R, R, J]
};

// The empty plan. No barrier.
template <class Team>
TOPOEP_STAGE void SetEmpty(Team& team, const Context& context, const State& state) {
  team.ForEach(context.ranks * context.slots, [&](int32_t i) { state.slot_expert[i] = -1; });
  team.ForEach(context.ranks * context.ranks, [&](int32_t i) {
    const int32_t source = i / context.ranks;
    const int32_t rank = i % context.ranks;
    int32_t* rows = state.Quota(context, source, rank, 0);
    for (int32_t j = 0; j < context.instances; ++j) {
      rows[j] = j < context.mains ? context.Omega(source, rank * context.mains + j) : 0;
    }
  });
}

// No barrier.
template <class Team>
TOPOEP_STAGE void CopyState(Team& team, const Context& context, const State& from, const State& to) {
  team.ForEach(context.ranks * context.slots, [&](int32_t i) { to.slot_expert[i] = from.slot_expert[i]; });
  team.ForEach(context.ranks * context.ranks, [&](int32_t i) {
    const int64_t row = int64_t{i} * context.instances;
    for (int32_t j = 0; j < context.instances; ++j) to.quota[row + j] = from.quota[row + j];
  });
}

}  // namespace topoep
