// Builds every candidate, improves it, and chooses; topoep_jax/plan/topoep/search.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/topoep/candidate.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/plan/topoep/improve.h"
#include "xla_ffi/plan/topoep/refine.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

inline constexpr int64_t kTolerance = 128;  // a plan slower than the best by one part in so many may win by its traffic

// A plan that competes: a candidate after its first, second or (if the cap asks for it) third phase, or the paper's.
struct Entry {
  Worth worth;
  int64_t inter_rows;
  int32_t exists;
};

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

  TOPOEP_BODY int64_t Cost(int32_t at) const { return entry[at].worth.cost; }
  TOPOEP_BODY bool Fits(const Problem& problem, int32_t at) const {
    return entry[at].exists != 0 && MeetsCap(problem, entry[at].worth.aligned);
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

// The entry that wins: the cheapest within the cap; among plans almost as cheap the one with the fewest rows between
// domains, as long as neither the empty plan nor the paper's is cheaper than that.
TOPOEP_STAGE inline int32_t Choose(const Problem& problem, const Entries& entries) {
  const auto cost = [&](int32_t i) { return entries.Cost(i); };
  const auto exists = [&](int32_t i) { return entries.entry[i].exists != 0; };
  const auto fits = [&](int32_t i) { return entries.Fits(problem, i); };
  const int32_t best = FindFirst(entries.count, fits, [&](int32_t i, int32_t j) { return cost(i) < cost(j); });
  if (best < 0) {  // nothing meets the cap: the plan that comes nearest
    return FindFirst(entries.count, exists, [&](int32_t i, int32_t j) {
      return IsLess(entries.entry[i].worth.aligned, entries.entry[j].worth.aligned, cost(i), cost(j));
    });
  }
  if (fits(0) && cost(best) == cost(0)) return 0;
  int64_t limit = cost(best) + cost(best) / kTolerance;
  for (const int32_t rival : {0, entries.Paper()}) {
    if (fits(rival)) limit = Min(limit, cost(rival));
  }
  return FindFirst(
      entries.count, [&](int32_t i) { return fits(i) && cost(i) <= limit; },
      [&](int32_t i, int32_t j) {
        return IsLess(entries.entry[i].inter_rows, entries.entry[j].inter_rows, cost(i), cost(j));
      });
}

// The cheapest entry within the cap that costs more than `last`, the lowest of equals; -1: none.
TOPOEP_BODY inline int32_t NextCheapest(const Problem& problem, const Entries& entries, int64_t last) {
  return FindFirst(
      entries.count, [&](int32_t i) { return entries.Fits(problem, i) && entries.Cost(i) > last; },
      [&](int32_t i, int32_t j) { return entries.Cost(i) < entries.Cost(j); });
}

// Refines the plan of entry `choice`, and the cheapest ones, into memory.state; returns what the best is worth.
// restore(entry) puts an entry's plan into memory.state.
template <class Team, class Restore>
TOPOEP_STAGE Worth RefineBest(Team& team, const Context& context, const Effort& effort, const Memory& memory,
                              const Entries& entries, int32_t choice, Restore restore) {
  const Problem& problem = *context.problem;
  const auto refine = [&](int32_t entry) {
    restore(entry);
    return Refine(team, context, effort, memory.improve, memory.spare_state, memory.state);
  };
  Worth best = refine(choice);
  int64_t last = -1;
  for (int32_t start = 0; MeetsCap(problem, best.aligned) && start < effort.refine_starts; ++start) {
    const int32_t entry = NextCheapest(problem, entries, last);
    if (entry < 0) break;
    last = entries.entry[entry].worth.cost;
    CopyState(team, context, memory.state, memory.best_state);
    team.Sync();
    const Worth worth = refine(entry);
    if (MeetsCap(problem, worth.aligned) && worth.cost < best.cost) {
      best = worth;
    } else {
      CopyState(team, context, memory.best_state, memory.state);
      team.Sync();
    }
  }
  return best;
}

}  // namespace topoep
