// Builds one candidate and runs its phases; topoep_jax/plan/topoep/candidate.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/topoep/apportion.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/plan/topoep/fill.h"
#include "xla_ffi/plan/topoep/greedy.h"
#include "xla_ffi/plan/topoep/improve.h"
#include "xla_ffi/plan/topoep/select.h"
#include "xla_ffi/plan/topoep/split.h"
#include "xla_ffi/plan/topoep/spread.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

inline constexpr int32_t kPhases = 3;
inline constexpr int32_t kLevelRounds = 8;  // that level a plan which misses the cap

// What one candidate works with; candidates that run side by side have one each.
struct Memory {
  TOPOEP_BODY Memory(const Context& context, Arena& arena)
      : state(context, arena),
        spare_state(context, arena),
        best_state(context, arena),
        selection(context, arena),
        fill(context, arena),
        jobs(context, arena),
        spread(context, arena),
        improve(context, arena) {}

  State state;
  State spare_state;
  State best_state;
  Selection selection;
  FillMemory fill;
  Jobs jobs;
  SpreadMemory spread;
  ImproveMemory improve;
};

template <class Team>
TOPOEP_BODY void Build(Team& team, const Context& context, const Effort& effort, const Candidate& candidate,
                       const Memory& memory) {
  if (candidate.sixteenths == 0) {
    SetEmpty(team, context, memory.state);
    if (candidate.spread >= 0 && candidate.price >= 0) {
      Greedy(team, context, candidate, memory.spread, memory.jobs, memory.state);
      return;
    }
  } else {
    Select(team, context, candidate, memory.selection);
    Fill(team, context, memory.selection, memory.fill, effort.fill_moves, memory.state);
    Split(team, context, memory.selection, memory.fill, memory.jobs, memory.state);
  }
  if (candidate.spread >= 0) Spread(team, context, candidate.spread, memory.spread, memory.jobs, memory.state);
}

// Builds a candidate and runs its phases up to `last`. record(improver, phase) is called after each; it may not write
// the plan, which must not be written before the next barrier either.
template <class Team, class Record>
TOPOEP_STAGE void RunCandidate(Team& team, const Context& context, const Effort& effort, int32_t index, int32_t last,
                               const Memory& memory, Record record) {
  Build(team, context, effort, effort.candidates[index], memory);
  Improver<Team> improver(team, context, memory.improve, memory.state);
  improver.Start();
  improver.Run(Target::kThrifty, effort.thrifty, effort.num_thrifty);
  record(improver, 0);
  if (last == 0) return;
  improver.Run(Target::kEager, effort.eager, effort.num_eager);
  record(improver, 1);
  if (last == 1 || MeetsCap(*context.problem, improver.Now().Aligned())) return;
  constexpr int32_t kKinds[kLevelRounds] = {};  // all of kind kLoad
  improver.Run(Target::kLevel, kKinds, kLevelRounds);
  record(improver, 2);
}

}  // namespace topoep
