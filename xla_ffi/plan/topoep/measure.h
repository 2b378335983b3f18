// What the quotas of a plan add up to; topoep_jax/plan/topoep/measure.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/cost.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// The slots that hold each expert when improvement starts, as lists in ascending order. Slots freed later stay in them,
// without rows.
struct Holders {
  TOPOEP_BODY Holders(const Context& context, Arena& arena) {
    arena.Take(context.experts, &first);
    arena.Take(int64_t{context.ranks} * context.slots, &next, &expert);
  }

  int32_t* first;   // [E] lowest slot r * N + n that holds the expert, -1: none
  int32_t* next;    // [R, N] the next one, -1: none
  int32_t* expert;  // [R, N] the expert of the slot, -1: free
};

// `holders.first` must be -1 everywhere.
template <class Team>
TOPOEP_BODY void ListHolders(Team& team, const Context& context, const State& state, const Holders& holders) {
  const int32_t slots = context.ranks * context.slots;
  team.ForEach(slots, [&](int32_t i) {
    const int32_t expert = state.slot_expert[i];
    holders.next[i] = -1;
    holders.expert[i] = expert;
    if (expert < 0) return;
    bool first = true;
    for (int32_t k = 0; k < i && first; ++k) first = state.slot_expert[k] != expert;
    if (first) holders.first[expert] = i;
    for (int32_t k = i + 1; k < slots; ++k) {
      if (state.slot_expert[k] != expert) continue;
      holders.next[i] = k;
      break;
    }
  });
}

struct Measure {
  TOPOEP_BODY Measure(const Context& context, Arena& arena)
      : num_words(context.ranks * (context.instances * (1 + context.num_domains) + 5) + 2),
        words(arena.Take<int64_t>(num_words)),
        best(arena.Take<Best>(kNumBests)),
        rows(words),
        by_domain(rows + int64_t{context.ranks} * context.instances),
        load(by_domain + int64_t{context.ranks} * context.instances * context.num_domains),
        inter_in(load + context.ranks),
        inter_out(inter_in + context.ranks),
        intra_in(inter_out + context.ranks),
        intra_out(intra_in + context.ranks),
        total(intra_out + context.ranks) {}

  static constexpr int32_t kNumBests = 7;

  TOPOEP_BODY int64_t Level() const { return best[0].key; }
  TOPOEP_BODY int64_t Inter() const { return best[1].key; }
  TOPOEP_BODY int64_t Intra() const { return best[2].key; }
  TOPOEP_BODY int64_t ComputePs() const { return best[3].key; }
  TOPOEP_BODY int64_t Aligned() const { return best[4].key; }
  TOPOEP_BODY int64_t InterPulls() const { return best[5].key; }
  TOPOEP_BODY int64_t IntraPulls() const { return best[6].key; }
  TOPOEP_BODY int64_t TotalInter() const { return total[0]; }
  TOPOEP_BODY int64_t TotalIntra() const { return total[1]; }

  int32_t num_words;
  int64_t* words;      // everything but `best`
  Best* best;          // of all ranks: level, inter and intra rows, compute time, aligned rows, inter and intra pulls
  int64_t* rows;       // [R, J]
  int64_t* by_domain;  // [R, J, M] by domain of the source
  int64_t* load;       // [R]
  int64_t* inter_in;   // [R] rows from other domains
  int64_t* inter_out;  // [R]
  int64_t* intra_in;   // [R] rows from another rank of the domain
  int64_t* intra_out;  // [R]
  int64_t* total;      // [2] of all ranks: inter rows, intra rows
};

// Whether a slot's replica has rows and must be pulled from another domain, or else from its own.
TOPOEP_BODY inline bool IsPulled(const Context& context, const Holders& holders, const Measure& measure, bool inter,
                                 int32_t slot) {
  const int32_t expert = holders.expert[slot];
  if (expert < 0) return false;
  const int32_t rank = slot / context.slots;
  if ((context.Home(expert) != context.DomainOf(rank)) != inter) return false;
  return measure.rows[rank * context.instances + context.mains + slot % context.slots] > 0;
}

// Copies that a rank receives, or sends of its mains, whichever are more.
TOPOEP_BODY inline int64_t MostPulls(const Context& context, const Holders& holders, const Measure& measure, bool inter,
                                     int32_t rank) {
  const int64_t in = Sum(
      context.slots, [&](int32_t n) { return IsPulled(context, holders, measure, inter, rank * context.slots + n); });
  int64_t out = 0;
  for (int32_t expert = rank * context.mains; expert < (rank + 1) * context.mains; ++expert) {
    for (int32_t slot = holders.first[expert]; slot >= 0; slot = holders.next[slot]) {
      out += IsPulled(context, holders, measure, inter, slot);
    }
  }
  return Max(in, out);
}

// What is maximal over ranks as best[what].
TOPOEP_BODY inline int64_t Dimension(const Context& context, const Holders& holders, const Measure& measure,
                                     int32_t what, int32_t rank) {
  const Problem& problem = *context.problem;
  if (what == 0) return context.Level(rank, measure.load[rank]);
  if (what == 1) return Max(measure.inter_in[rank], measure.inter_out[rank]);
  if (what == 2) return Max(measure.intra_in[rank], measure.intra_out[rank]);
  if (what >= 5) return MostPulls(context, holders, measure, what == 5, rank);
  const int64_t* rows = measure.rows + rank * context.instances;
  if (what == 3) return RankComputePs(problem, rank, rows, context.instances);
  return Sum(context.instances, [&](int32_t j) { return CeilDiv(rows[j], problem.block_rows) * problem.block_rows; });
}

// Everything but `best`, by reading all quotas; the measure's words must be 0. No barrier.
template <class Team>
TOPOEP_BODY void Count(Team& team, const Context& context, const State& state, const Measure& measure) {
  team.ForEach(context.ranks * context.instances, [&](int32_t i) {
    const int32_t rank = i / context.instances;
    int64_t* by_domain = measure.by_domain + int64_t{i} * context.num_domains;
    int64_t sum = 0;
    for (int32_t s = 0; s < context.ranks; ++s) {
      const int64_t rows = *state.Quota(context, s, rank, i % context.instances);
      by_domain[context.DomainOf(s)] += rows;
      sum += rows;
    }
    const int64_t own = by_domain[context.DomainOf(rank)];
    measure.rows[i] = sum;
    team.Add(&measure.load[rank], sum);
    team.Add(&measure.inter_in[rank], sum - own);
    team.Add(&measure.intra_in[rank], own - *state.Quota(context, rank, rank, i % context.instances));
  });
  team.ForEach(context.ranks, [&](int32_t s) {
    int64_t inter = 0;
    int64_t intra = 0;
    for (int32_t r = 0; r < context.ranks; ++r) {
      if (r == s) continue;
      const int32_t* quota = state.Quota(context, s, r, 0);
      const int64_t rows = Sum(context.instances, [&](int32_t j) { return quota[j]; });
      (context.DomainOf(r) == context.DomainOf(s) ? intra : inter) += rows;
    }
    measure.inter_out[s] = inter;
    measure.intra_out[s] = intra;
    team.Add(&measure.total[0], inter);
    team.Add(&measure.total[1], intra);
  });
}

// Adds rows of a source that an instance executes, or takes away as many if negative.
template <class Team>
TOPOEP_BODY void AddExecuted(Team& team, const Context& context, const Measure& measure, int32_t source, int32_t rank,
                             int32_t instance, int64_t rows) {
  const int64_t item = int64_t{rank} * context.instances + instance;
  const int32_t domain = context.DomainOf(source);
  team.Add(&measure.rows[item], rows);
  team.Add(&measure.by_domain[item * context.num_domains + domain], rows);
  team.Add(&measure.load[rank], rows);
  if (source == rank) return;
  const bool inter = context.DomainOf(rank) != domain;
  team.Add(&(inter ? measure.inter_in : measure.intra_in)[rank], rows);
  team.Add(&(inter ? measure.inter_out : measure.intra_out)[source], rows);
  team.Add(&measure.total[inter ? 0 : 1], rows);
}

// The busiest ranks; one dependent step.
template <class Team>
TOPOEP_STAGE void FindBest(Team& team, const Context& context, const Holders& holders, const Measure& measure) {
  team.ArgMaxEach(
      Measure::kNumBests, context.ranks,
      [&](int32_t what, int32_t r) { return Dimension(context, holders, measure, what, r); },
      [&](int32_t what, Best best) { measure.best[what] = best; });
}

}  // namespace topoep
