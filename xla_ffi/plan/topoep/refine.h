// Small problems: one slot is changed at a time; topoep_jax/plan/topoep/refine.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/plan/topoep/improve.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// Change c of slot c / (E + 1): its rows go back to the main, and it holds expert c % (E + 1) - 1, or nothing.
TOPOEP_BODY inline bool IsChange(const Context& context, const State& state, int32_t change) {
  const int32_t slot = change / (context.experts + 1);
  const int32_t expert = change % (context.experts + 1) - 1;
  if (state.slot_expert[slot] == expert) return false;
  const int32_t rank = slot / context.slots;
  return expert < 0 || (context.MayHold(rank, expert) && state.InstanceOf(context, rank, expert) < 0);
}

// What it writes is seen after the next barrier.
template <class Team>
TOPOEP_STAGE void Change(Team& team, const Context& context, int32_t change, const State& state) {
  const int32_t slot = change / (context.experts + 1);
  const int32_t rank = slot / context.slots;
  const int32_t old = state.slot_expert[slot];
  team.Sync();
  team.ForEach(context.ranks, [&](int32_t source) {
    int32_t* rows = state.Quota(context, source, rank, context.mains + slot % context.slots);
    if (old >= 0) *state.Quota(context, source, old / context.mains, old % context.mains) += *rows;
    *rows = 0;
  });
  team.Single([&] { state.slot_expert[slot] = change % (context.experts + 1) - 1; });
}

TOPOEP_BODY inline bool CanRefine(const Context& context, const Effort& effort) {
  return int64_t{context.ranks} * context.slots * (context.experts + 1) <= effort.refine_changes;
}

// Improves the plan in `state`, whose worth it returns; `best` is working memory of the same size.
template <class Team>
TOPOEP_STAGE Worth Refine(Team& team, const Context& context, const Effort& effort, const ImproveMemory& memory,
                          const State& best, const State& state) {
  const Problem& problem = *context.problem;
  const auto run = [&](int32_t change) {
    if (change >= 0) Change(team, context, change, state);
    Improver<Team> improver(team, context, memory, state);
    improver.Start();
    if (change >= 0) improver.Run(Target::kEager, effort.eager, effort.num_eager);
    const Worth worth = improver.NowWorth();
    team.Sync();
    return worth;
  };
  Worth worth = run(-1);
  if (!MeetsCap(problem, worth.aligned)) return worth;
  const int32_t changes = context.ranks * context.slots * (context.experts + 1);
  for (int32_t wave = 0; wave < effort.refine_waves; ++wave) {
    CopyState(team, context, state, best);
    team.Sync();
    int32_t chosen = -1;
    for (int32_t change = 0; change < changes; ++change) {
      if (!IsChange(context, best, change)) continue;
      const Worth changed = run(change);
      if (MeetsCap(problem, changed.aligned) && changed.cost < worth.cost) {
        worth = changed;
        chosen = change;
      }
      CopyState(team, context, best, state);
      team.Sync();
    }
    if (chosen < 0) break;
    run(chosen);
  }
  return worth;
}

}  // namespace topoep
