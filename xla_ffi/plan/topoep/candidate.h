// From a candidate to its plans, and the choice among the plans of all candidates.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_CANDIDATE_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_CANDIDATE_H_

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/fill.h"
#include "xla_ffi/plan/topoep/improve.h"
#include "xla_ffi/plan/topoep/search.h"
#include "xla_ffi/plan/topoep/select.h"
#include "xla_ffi/plan/topoep/split.h"
#include "xla_ffi/plan/topoep/spread.h"

namespace topoep {

// A plan that competes: a candidate after its first, second or (if the cap asks for it) third phase, or the paper's.
struct Entry {
  Worth worth;
  int64_t inter_rows;
  int32_t exists;
};
inline constexpr int32_t kPhases = 3;

// The plans that compete. They are kept if that takes at most `keep_bytes`, or else the one chosen is made again.
struct Entries {
  Entries(const Context& context, int32_t num_candidates, int64_t keep_bytes, Arena& arena)
      : count(num_candidates * kPhases + 1), entry(arena.Take<Entry>(count)), choice(arena.Take<int32_t>(1)) {
    const int64_t slots = int64_t{context.ranks} * context.slots;
    const int64_t quotas = context.problem->NumQuotas();
    if (quotas + slots > keep_bytes / static_cast<int64_t>(sizeof(int32_t)) / count) return;
    kept_slots = arena.Take<int32_t>(count * slots);
    kept_quotas = arena.Take<int32_t>(count * quotas);
  }

  TOPOEP_BODY bool Keeps() const { return kept_quotas != nullptr; }
  TOPOEP_BODY int32_t Paper() const { return count - 1; }
  TOPOEP_BODY State Kept(const Context& context, int32_t at) const {
    return {kept_slots + int64_t{at} * context.ranks * context.slots, kept_quotas + at * context.problem->NumQuotas()};
  }

  int32_t count;  // three for each candidate, of which 0 is the empty plan, then the paper's
  Entry* entry;
  int32_t* choice;                 // [1]
  int32_t* kept_slots = nullptr;   // [count, R, N]
  int32_t* kept_quotas = nullptr;  // [count, R, R, J]
};

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

// Scores the plan in the state as entry `at`, and keeps it where plans are kept. The state must not be written before
// the next barrier.
template <class Team>
TOPOEP_BODY void Record(Team& team, const Context& context, Improver<Team>& improver, const State& state,
                        const Entries& entries, int32_t at) {
  const Worth worth = improver.NowWorth();
  team.Single([&] { entries.entry[at] = Entry{worth, improver.Now().TotalInter(), 1}; });
  if (!entries.Keeps()) return;
  team.Sync();
  CopyState(team, context, state, entries.Kept(context, at));
}

// Builds a candidate and runs its phases up to `last`; records each if `entries` is given.
template <class Team>
TOPOEP_STAGE void RunCandidate(Team& team, const Context& context, const Effort& effort, int32_t index, int32_t last,
                               const Memory& memory, const Entries* entries) {
  const Problem& problem = *context.problem;
  const int32_t first = index * kPhases;
  Build(team, context, effort, effort.candidates[index], memory);
  Improver<Team> improver(team, context, memory.improve, memory.state);
  improver.Start();
  improver.Run(Target::kThrifty, effort.thrifty, effort.num_thrifty);
  if (entries != nullptr) Record(team, context, improver, memory.state, *entries, first);
  if (last == 0) return;
  improver.Run(Target::kEager, effort.eager, effort.num_eager);
  if (entries != nullptr) Record(team, context, improver, memory.state, *entries, first + 1);
  const bool over = problem.cap_rows != kNoCap && improver.Now().Aligned() > problem.cap_rows;
  if (entries != nullptr) team.Single([&] { entries->entry[first + 2].exists = 0; });
  if (last == 1 || !over) return;
  constexpr int32_t kLevelRounds[8] = {};  // all of kind kLoad
  improver.Run(Target::kLevel, kLevelRounds, 8);
  if (entries != nullptr) Record(team, context, improver, memory.state, *entries, first + 2);
}

TOPOEP_BODY inline bool Fits(const Problem& problem, const Entry& entry) {
  return entry.exists && entry.worth.MeetsCap(problem);
}

// The entry that wins: the cheapest within the cap; among plans within 1/128 of it the one with the least traffic
// across domains, as long as neither the empty plan nor the paper's is cheaper than that.
TOPOEP_STAGE inline int32_t Choose(const Problem& problem, const Entries& all) {
  const Entry* entries = all.entry;
  const int32_t num_entries = all.count;
  const auto fits = [&](int32_t i) { return Fits(problem, entries[i]); };
  int32_t best = -1;
  for (int32_t i = 0; i < num_entries; ++i) {
    if (fits(i) && (best < 0 || entries[i].worth.cost < entries[best].worth.cost)) best = i;
  }
  if (best < 0) {  // nothing meets the cap: the plan that comes nearest
    for (int32_t i = 0; i < num_entries; ++i) {
      if (!entries[i].exists) continue;
      const bool nearer =
          best < 0 || entries[i].worth.aligned < entries[best].worth.aligned ||
          (entries[i].worth.aligned == entries[best].worth.aligned && entries[i].worth.cost < entries[best].worth.cost);
      if (nearer) best = i;
    }
    return best;
  }
  int64_t limit = entries[best].worth.cost + entries[best].worth.cost / 128;
  for (const int32_t other : {0, all.Paper()}) {
    if (fits(other) && entries[other].worth.cost < limit) limit = entries[other].worth.cost;
  }
  if (fits(0) && entries[best].worth.cost == entries[0].worth.cost) return 0;
  int32_t chosen = best;
  for (int32_t i = 0; i < num_entries; ++i) {
    if (!fits(i) || entries[i].worth.cost > limit) continue;
    const Entry& a = entries[i];
    const Entry& b = entries[chosen];
    const bool better =
        a.inter_rows < b.inter_rows ||
        (a.inter_rows == b.inter_rows && (a.worth.cost < b.worth.cost || (a.worth.cost == b.worth.cost && i < chosen)));
    if (better) chosen = i;
  }
  return chosen;
}

// The cheapest entry within the cap that costs more than `last`, the lowest of equals; -1: none.
TOPOEP_BODY inline int32_t NextCheapest(const Problem& problem, const Entry* entries, int32_t num_entries,
                                        int64_t last) {
  int32_t best = -1;
  for (int32_t i = 0; i < num_entries; ++i) {
    if (!Fits(problem, entries[i]) || entries[i].worth.cost <= last) continue;
    if (best < 0 || entries[i].worth.cost < entries[best].worth.cost) best = i;
  }
  return best;
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_CANDIDATE_H_
