// From a candidate to its plans, and the choice among the plans of all candidates.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_CANDIDATE_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_CANDIDATE_H_

#include <cstdint>

#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/fill.h"
#include "xla_ffi/plan/topoep/improve.h"
#include "xla_ffi/plan/topoep/search.h"
#include "xla_ffi/plan/topoep/select.h"
#include "xla_ffi/plan/topoep/split.h"
#include "xla_ffi/plan/topoep/spread.h"

namespace topoep {

// A plan that competes: candidate after its first, second or (if the cap asks for it) third phase.
struct Entry {
  int64_t cost;
  int64_t inter_rows;
  int64_t aligned;
  int32_t exists;
};
inline constexpr int32_t kPhases = 3;

struct Memory {
  Memory(const Context& context, int32_t num_entries, Arena& arena)
      : state(context, arena),
        spare_state(context, arena),
        best_state(context, arena),
        selection(context, arena),
        fill(context, arena),
        jobs(context, arena),
        spread(context, arena),
        improve(context, arena),
        entries(arena.Take<Entry>(num_entries)),
        choice(arena.Take<int32_t>(1)) {}

  State state;
  State spare_state;
  State best_state;
  Selection selection;
  FillMemory fill;
  Jobs jobs;
  SpreadMemory spread;
  ImproveMemory improve;
  Entry* entries;  // [num_candidates x kPhases + 1], the paper's plan last
  int32_t* choice;
};

template <class Team>
TOPOEP_BODY void Build(Team& team, const Context& context, const Effort& effort, const Candidate& candidate,
                       const Memory& memory) {
  if (candidate.sixteenths == 0) {
    SetEmpty(team, context, memory.state);
    if (candidate.spread >= 0 && candidate.price >= 0) {
      SpreadGreedily(team, context, candidate, memory.spread, memory.jobs, memory.state);
      return;
    }
  } else {
    Select(team, context, candidate, memory.selection);
    Fill(team, context, memory.selection, memory.fill, effort.fill_moves, memory.state);
    Split(team, context, memory.selection, memory.fill, memory.jobs, memory.state);
  }
  if (candidate.spread >= 0) Spread(team, context, candidate.spread, memory.spread, memory.jobs, memory.state);
}

// Scores the plan in the state as entry `at`.
template <class Team>
TOPOEP_BODY void Record(Team& team, Improver<Team>& improver, const Memory& memory, int32_t at) {
  const int64_t cost = improver.PredictedPs();
  team.Single([&] { memory.entries[at] = Entry{cost, improver.Now().TotalInter(), improver.Now().Aligned(), 1}; });
}

// Builds a candidate and runs its phases up to `last`; writes their entries if `record`.
template <class Team>
TOPOEP_BODY void RunCandidate(Team& team, const Context& context, const Effort& effort, int32_t index, int32_t last,
                              bool record, const Memory& memory) {
  const Problem& problem = *context.problem;
  Build(team, context, effort, effort.candidates[index], memory);
  Improver<Team> improver(team, context, memory.improve, memory.state);
  improver.Start();
  improver.Run(Target::kThrifty, effort.thrifty, effort.num_thrifty);
  if (record) Record(team, improver, memory, index * kPhases);
  if (last == 0) return;
  improver.Run(Target::kEager, effort.eager, effort.num_eager);
  if (record) Record(team, improver, memory, index * kPhases + 1);
  const bool over = problem.cap_rows != kNoCap && improver.Now().Aligned() > problem.cap_rows;
  if (record) team.Single([&] { memory.entries[index * kPhases + 2].exists = 0; });
  if (last == 1 || !over) return;
  constexpr int32_t kLevelRounds[8] = {};  // all of kind kLoad
  improver.Run(Target::kLevel, kLevelRounds, 8);
  if (record) Record(team, improver, memory, index * kPhases + 2);
}

TOPOEP_BODY inline bool Fits(const Problem& problem, const Entry& entry) {
  return entry.exists && (problem.cap_rows == kNoCap || entry.aligned <= problem.cap_rows);
}

// The entry that wins: the cheapest within the cap; among plans within 1/128 of it the one with the least traffic
// across domains, as long as neither the empty plan nor the paper's is cheaper than that.
TOPOEP_BODY inline int32_t Choose(const Problem& problem, const Entry* entries, int32_t num_entries, int32_t paper) {
  const auto fits = [&](int32_t i) { return Fits(problem, entries[i]); };
  int32_t best = -1;
  for (int32_t i = 0; i < num_entries; ++i) {
    if (fits(i) && (best < 0 || entries[i].cost < entries[best].cost)) best = i;
  }
  if (best < 0) {  // nothing meets the cap: the plan that comes nearest
    for (int32_t i = 0; i < num_entries; ++i) {
      if (!entries[i].exists) continue;
      const bool nearer = best < 0 || entries[i].aligned < entries[best].aligned ||
                          (entries[i].aligned == entries[best].aligned && entries[i].cost < entries[best].cost);
      if (nearer) best = i;
    }
    return best;
  }
  int64_t limit = entries[best].cost + entries[best].cost / 128;
  for (const int32_t other : {0, paper}) {
    if (fits(other) && entries[other].cost < limit) limit = entries[other].cost;
  }
  if (fits(0) && entries[best].cost == entries[0].cost) return 0;
  int32_t chosen = best;
  for (int32_t i = 0; i < num_entries; ++i) {
    if (!fits(i) || entries[i].cost > limit) continue;
    const Entry& a = entries[i];
    const Entry& b = entries[chosen];
    const bool better = a.inter_rows < b.inter_rows ||
                        (a.inter_rows == b.inter_rows && (a.cost < b.cost || (a.cost == b.cost && i < chosen)));
    if (better) chosen = i;
  }
  return chosen;
}

// The cheapest entry within the cap that costs more than `last`, the lowest of equals; -1: none.
TOPOEP_BODY inline int32_t NextCheapest(const Problem& problem, const Entry* entries, int32_t num_entries,
                                        int64_t last) {
  int32_t best = -1;
  for (int32_t i = 0; i < num_entries; ++i) {
    if (!Fits(problem, entries[i]) || entries[i].cost <= last) continue;
    if (best < 0 || entries[i].cost < entries[best].cost) best = i;
  }
  return best;
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_CANDIDATE_H_
