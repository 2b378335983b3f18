// The last step of every planner: slots in order, loads and status; bodies for any team.

#ifndef TOPOEP_XLA_FFI_PLAN_FINISH_H_
#define TOPOEP_XLA_FFI_PLAN_FINISH_H_

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/plan.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// Working memory of SortSlots().
struct SortMemory {
  TOPOEP_BODY SortMemory(const Problem& problem, Arena& arena)
      : kept(arena.Take<int32_t>(int64_t{problem.num_ranks} * problem.num_slots)),
        place(arena.Take<int32_t>(int64_t{problem.num_ranks} * problem.num_slots)),
        num_kept(arena.Take<int32_t>(1)) {}

  int32_t* kept;      // [R, N] whether the slot's replica has rows
  int32_t* place;     // [R, N] the slot that it gets; -1: none
  int32_t* num_kept;  // [1] replicas that remain
};

// Writes to `sorted_expert` and `sorted_quota` the plan of `slot_expert` and `quota` (slots in any order, some perhaps
// without rows) with the replicas that have rows in ascending expert id and empty slots last. Two dependent steps; what
// it writes is seen after the next barrier.
template <class Team>
TOPOEP_BODY void SortSlots(Team& team, const Problem& problem, const int32_t* slot_expert, const int32_t* quota,
                           const SortMemory& memory, int32_t* sorted_expert, int32_t* sorted_quota) {
  const int32_t mains = problem.MainsPerRank();
  const int32_t slots = problem.num_slots;
  team.Single([&] { *memory.num_kept = 0; });
  team.ForEach(problem.num_ranks * slots, [&](int32_t i) {
    bool has_rows = false;
    for (int32_t source = 0; source < problem.num_ranks && !has_rows && slot_expert[i] >= 0; ++source) {
      has_rows = quota[problem.QuotaAt(source, i / slots, mains + i % slots)] > 0;
    }
    memory.kept[i] = has_rows;
  });
  team.Sync();
  team.ForEach(problem.num_ranks * slots, [&](int32_t i) {
    const int32_t first = i / slots * slots;
    int32_t place = -1;
    if (memory.kept[i]) {
      place = 0;
      for (int32_t other = first; other < first + slots; ++other) {
        place += memory.kept[other] && slot_expert[other] < slot_expert[i];
      }
      team.Add(memory.num_kept, 1);
    }
    memory.place[i] = place;
  });
  team.Sync();
  team.ForEach(problem.num_ranks, [&](int32_t rank) {
    const int32_t first = rank * slots;
    for (int32_t n = 0; n < slots; ++n) sorted_expert[first + n] = -1;
    for (int32_t n = 0; n < slots; ++n) {
      if (memory.kept[first + n]) sorted_expert[first + memory.place[first + n]] = slot_expert[first + n];
    }
  });
  team.ForEach(problem.num_ranks * problem.num_ranks, [&](int32_t i) {
    const int32_t first = i % problem.num_ranks * slots;
    const int32_t* from = quota + int64_t{i} * (mains + slots);
    int32_t* to = sorted_quota + int64_t{i} * (mains + slots);
    for (int32_t j = 0; j < mains; ++j) to[j] = from[j];
    for (int32_t n = 0; n < slots; ++n) to[mains + n] = 0;
    for (int32_t n = 0; n < slots; ++n) {
      if (memory.kept[first + n]) to[mains + memory.place[first + n]] = from[mains + n];
    }
  });
}

// What a plan is worth: time under problem.objective, and the most aligned rows of a rank.
struct Worth {
  int64_t cost;
  int64_t aligned;

  TOPOEP_BODY bool MeetsCap(const Problem& problem) const {
    return problem.cap_rows == kNoCap || aligned <= problem.cap_rows;
  }
};

// Writes the final plan: SortSlots(), rank_load, predicted_ps and status. `empty` is the worth of the plan without
// replicas. Two dependent steps.
template <class Team>
TOPOEP_BODY void Finish(Team& team, const Problem& problem, const int32_t* slot_expert, const int32_t* quota,
                        Worth worth, Worth empty, const SortMemory& memory, const Plan& plan) {
  team.ForEach(problem.num_ranks, [&](int32_t rank) { plan.rank_load[rank] = 0; });
  SortSlots(team, problem, slot_expert, quota, memory, plan.slot_expert, plan.quota);
  team.ForEach(problem.num_ranks * problem.num_ranks, [&](int32_t i) {
    const int32_t* rows = quota + int64_t{i} * problem.InstancesPerRank();
    int32_t sum = 0;
    for (int32_t j = 0; j < problem.InstancesPerRank(); ++j) sum += rows[j];
    team.Add(&plan.rank_load[i % problem.num_ranks], sum);
  });
  team.Single([&] {
    plan.predicted_ps[0] = static_cast<int32_t>(worth.cost >> 32);
    plan.predicted_ps[1] = static_cast<int32_t>(static_cast<uint32_t>(worth.cost));
    int32_t status = 0;
    if (worth.MeetsCap(problem)) status |= kCapMet;
    if (*memory.num_kept == 0) status |= kEmpty;
    if (empty.MeetsCap(problem) && worth.cost > empty.cost) status |= kOverEmptyCost;
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

#endif  // TOPOEP_XLA_FFI_PLAN_FINISH_H_
