// The last step of every planner: slots in order, loads, status; topoep_jax/plan/finish.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// Where the replica in slot `n` of a rank stands among the rank's replicas by expert id.
TOPOEP_BODY inline int32_t PlaceOf(const int32_t* slot_expert, int32_t num_slots, int32_t n) {
  return static_cast<int32_t>(
      Sum(num_slots, [&](int32_t other) { return slot_expert[other] >= 0 && slot_expert[other] < slot_expert[n]; }));
}

// Writes to `sorted_expert` and `sorted_quota` the plan of `slot_expert` and `quota`, whose replicas all have rows,
// with each rank's replicas in ascending expert id and empty slots last. No dependent step.
template <class Team>
TOPOEP_STAGE void SortSlots(Team& team, const Problem& problem, const int32_t* slot_expert, const int32_t* quota,
                            int32_t* sorted_expert, int32_t* sorted_quota) {
  const int32_t mains = problem.MainsPerRank();
  const int32_t slots = problem.num_slots;
  const auto permute = [slots](const int32_t* experts, const int32_t* from, int32_t* to, int32_t empty) {
    for (int32_t n = 0; n < slots; ++n) to[n] = empty;
    for (int32_t n = 0; n < slots; ++n) {
      if (experts[n] >= 0) to[PlaceOf(experts, slots, n)] = from[n];
    }
  };
  team.ForEach(problem.num_ranks, [&](int32_t rank) {
    const int32_t* experts = slot_expert + int64_t{rank} * slots;
    permute(experts, experts, sorted_expert + int64_t{rank} * slots, -1);
  });
  team.ForEach(problem.num_ranks * problem.num_ranks, [&](int32_t i) {
    const int32_t* from = quota + int64_t{i} * (mains + slots);
    int32_t* to = sorted_quota + int64_t{i} * (mains + slots);
    for (int32_t j = 0; j < mains; ++j) to[j] = from[j];
    permute(slot_expert + int64_t{i % problem.num_ranks} * slots, from + mains, to + mains, 0);
  });
}

// What a plan is worth.
struct Worth {
  int64_t cost;     // time under problem.objective
  int64_t aligned;  // most aligned rows of a rank
  int32_t has_replicas;
};

TOPOEP_BODY inline bool MeetsCap(const Problem& problem, int64_t aligned_rows) {
  return problem.cap_rows == kNoCap || aligned_rows <= problem.cap_rows;
}

// Writes the final plan of slots (in any order; all replicas have rows) and quotas, whose `worth` is known, as is that
// of the plan without replicas. plan.rank_load must be zero. No dependent step.
template <class Team>
TOPOEP_STAGE void Finish(Team& team, const Problem& problem, const int32_t* slot_expert, const int32_t* quota,
                         Worth worth, Worth empty, const Plan& plan) {
  SortSlots(team, problem, slot_expert, quota, plan.slot_expert, plan.quota);
  team.ForEach(problem.num_ranks * problem.num_ranks, [&](int32_t i) {
    const int32_t* rows = quota + int64_t{i} * problem.InstancesPerRank();
    const int64_t sum = Sum(problem.InstancesPerRank(), [&](int32_t j) { return rows[j]; });
    team.Add(&plan.rank_load[i % problem.num_ranks], static_cast<int32_t>(sum));
  });
  team.Single([&] {
    plan.predicted_ps[0] = static_cast<int32_t>(worth.cost >> 32);
    plan.predicted_ps[1] = static_cast<int32_t>(static_cast<uint32_t>(worth.cost));
    int32_t status = 0;
    if (MeetsCap(problem, worth.aligned)) status |= kCapMet;
    if (!worth.has_replicas) status |= kEmpty;
    if (MeetsCap(problem, empty.aligned) && worth.cost > empty.cost) status |= kOverEmptyCost;
    *plan.status = status;
  });
}

// The answer to bad demand: no replica and no quota.
template <class Team>
TOPOEP_BODY void Refuse(Team& team, const Problem& problem, const Plan& plan) {
  team.ForEach(problem.num_ranks * problem.num_slots, [&](int32_t i) { plan.slot_expert[i] = -1; });
  team.ForEach(problem.num_ranks * problem.num_ranks, [&](int32_t i) {
    int32_t* rows = plan.quota + int64_t{i} * problem.InstancesPerRank();
    for (int32_t j = 0; j < problem.InstancesPerRank(); ++j) rows[j] = 0;
  });
  team.ForEach(problem.num_ranks, [&](int32_t rank) { plan.rank_load[rank] = 0; });
  team.Single([&] {
    plan.predicted_ps[0] = plan.predicted_ps[1] = 0;
    *plan.status = kBadInput | kEmpty;
  });
}

}  // namespace topoep
