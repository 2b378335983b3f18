// What a plan's quotas add up to, by instance, by rank, and on the busiest rank.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_MEASURE_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_MEASURE_H_

#include <cstdint>

#include "xla_ffi/plan/cost.h"
#include "xla_ffi/plan/topoep/context.h"

namespace topoep {

// What a plan's quotas add up to. Two of them alternate: the plan as it is, and as a round would make it.
struct Measure {
  Measure(const Context& context, Arena& arena)
      : rows(arena.Take<int64_t>(int64_t{context.ranks} * context.instances)),
        by_domain(arena.Take<int64_t>(int64_t{context.ranks} * context.instances * context.num_domains)),
        counts(arena.Take<int64_t>(5 * int64_t{context.ranks})),
        best(arena.Take<Best>(kNumBests)),
        load(counts),
        inter_in(counts + context.ranks),
        inter_out(counts + 2 * context.ranks),
        intra_in(counts + 3 * context.ranks),
        intra_out(counts + 4 * context.ranks) {}

  static constexpr int32_t kNumBests = 5;

  TOPOEP_BODY int64_t Level() const { return best[0].key; }
  TOPOEP_BODY int64_t Inter() const { return best[1].key; }
  TOPOEP_BODY int64_t Intra() const { return best[2].key; }
  TOPOEP_BODY int64_t ComputePs() const { return best[3].key; }
  TOPOEP_BODY int64_t Aligned() const { return best[4].key; }

  int64_t* rows;       // [R, J]
  int64_t* by_domain;  // [R, J, M] by domain of the source
  int64_t* counts;
  Best* best;          // of all ranks: level, rows across domains, rows inside, compute time, aligned rows
  int64_t* load;       // [R]
  int64_t* inter_in;   // [R] rows across domains
  int64_t* inter_out;  // [R]
  int64_t* intra_in;   // [R] rows inside the domain, from or to another rank
  int64_t* intra_out;  // [R]
};

TOPOEP_BODY inline int64_t LargerOf(int64_t a, int64_t b) { return a > b ? a : b; }

// What is maximal over ranks as best[what].
TOPOEP_BODY inline int64_t Dimension(const Context& context, const Measure& measure, int32_t what, int32_t rank) {
  if (what == 0) return context.Level(rank, measure.load[rank]);
  if (what == 1) return LargerOf(measure.inter_in[rank], measure.inter_out[rank]);
  if (what == 2) return LargerOf(measure.intra_in[rank], measure.intra_out[rank]);
  const int64_t* rows = measure.rows + int64_t{rank} * context.instances;
  int64_t padded = 0;
  int64_t active = 0;
  int64_t aligned = 0;
  for (int32_t j = 0; j < context.instances; ++j) {
    if (what == 3) padded += PaddedRows((*context.problem).cost, rows[j]);
    if (what == 3) active += rows[j] > 0;
    if (what == 4)
      aligned +=
          (rows[j] + (*context.problem).block_rows - 1) / (*context.problem).block_rows * (*context.problem).block_rows;
  }
  return what == 3 ? RankComputePs((*context.problem), rank, padded, active) : aligned;
}

template <class Team>
TOPOEP_BODY void Clear(Team& team, const Context& context, const Measure& measure) {
  team.ForEach(5 * context.ranks, [&](int32_t i) { measure.counts[i] = 0; });
}

// Two dependent steps; `measure` must be clear.
template <class Team>
TOPOEP_BODY void Count(Team& team, const Context& context, const State& state, const Measure& measure) {
  const int32_t domains = context.num_domains;
  team.ForEach(context.ranks * context.instances, [&](int32_t i) {
    const int32_t rank = i / context.instances;
    const int32_t domain = context.DomainOf(rank);
    int64_t* by_domain = measure.by_domain + int64_t{i} * domains;
    for (int32_t d = 0; d < domains; ++d) by_domain[d] = 0;
    int64_t sum = 0;
    for (int32_t s = 0; s < context.ranks; ++s) {
      const int64_t rows = *state.Quota(context, s, rank, i % context.instances);
      by_domain[context.DomainOf(s)] += rows;
      sum += rows;
    }
    measure.rows[i] = sum;
    team.Add(&measure.load[rank], sum);
    team.Add(&measure.inter_in[rank], sum - by_domain[domain]);
    team.Add(&measure.intra_in[rank], by_domain[domain] - *state.Quota(context, rank, rank, i % context.instances));
  });
  team.ForEach(context.ranks, [&](int32_t s) {
    int64_t inter = 0;
    int64_t intra = 0;
    for (int32_t r = 0; r < context.ranks; ++r) {
      if (r == s) continue;
      const int32_t* quota = state.Quota(context, s, r, 0);
      int64_t rows = 0;
      for (int32_t j = 0; j < context.instances; ++j) rows += quota[j];
      (context.DomainOf(r) == context.DomainOf(s) ? intra : inter) += rows;
    }
    measure.inter_out[s] = inter;
    measure.intra_out[s] = intra;
  });
  team.Sync();
  team.ArgMaxEach(
      Measure::kNumBests, context.ranks, [&](int32_t what, int32_t r) { return Dimension(context, measure, what, r); },
      [&](int32_t what, Best best) { measure.best[what] = best; });
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_MEASURE_H_
