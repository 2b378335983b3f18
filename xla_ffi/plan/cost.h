// Predicted time of a plan, as bodies for any team; topoep_jax/plan/cost.py is the same in NumPy.

#pragma once

#include <cstdint>
#include <limits>

#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/links.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/pulls.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// Rows of an instance, padded to whole tiles.
TOPOEP_BODY inline int64_t PaddedRows(const CostModel& cost, int64_t rows) {
  return cost.tile_rows == 0 ? rows : CeilDiv(rows, cost.tile_rows) * cost.tile_rows;
}

// Picoseconds that `rank` computes: max-affine in its padded rows and its instances with rows, at its own speed. `rows`
// has `columns` parts of its rows, one for each instance where that matters.
TOPOEP_BODY inline int64_t RankComputePs(const Problem& problem, int32_t rank, const int64_t* rows, int32_t columns) {
  const CostModel& cost = problem.cost;
  const int64_t padded = Sum(columns, [&](int32_t j) { return PaddedRows(cost, rows[j]); });
  const int64_t active = Sum(columns, [&](int32_t j) { return rows[j] > 0; });
  const int64_t ps = Max(cost.instance_ps * active, cost.row_ps * padded);
  if (cost.rank_speed == nullptr) return ps;
  // floor(ps * 1000 / speed) without leaving 64 bits.
  const int64_t speed = cost.rank_speed[rank];
  return ps / speed * kNominalSpeed + ps % speed * kNominalSpeed / speed;
}

// The largest row_ps (with the most padded rows of a layer) and instance_ps (with kMaxInstances) such that compute
// takes at most half of 64 bits on the slowest rank, of `slowest` permille; CostModel has the same limits.
inline int64_t ComputeLimit(int64_t count, int64_t slowest) {
  const int64_t limit = std::numeric_limits<int64_t>::max() / (2 * count);
  return slowest >= kNominalSpeed ? limit : limit / kNominalSpeed * slowest;
}
inline int64_t MaxPaddedRows(int64_t tile_rows) {
  return kMaxRows + kMaxInstances * (tile_rows > 1 ? tile_rows - 1 : 0);
}

// Working memory of PredictPs(): NumWords() words and Links::kNumBests Bests, in memory that the whole team sees.
struct CostMemory {
  int64_t* words;
  Best* bests;

  TOPOEP_BODY static int64_t NumInstances(const Problem& problem) {
    return int64_t{problem.num_ranks} * problem.InstancesPerRank();
  }
  TOPOEP_BODY static int64_t NumWords(const Problem& problem) {
    return Links::NumWords(problem.num_ranks) + NumInstances(problem) + PullCounts::NumWords(problem);
  }
};

// How finely compute depends on rows: on each instance of a rank, or only on their sum.
TOPOEP_BODY inline int32_t RowColumns(const Problem& problem) {
  return problem.cost.instance_ps > 0 || problem.cost.tile_rows > 0 ? problem.InstancesPerRank() : 1;
}

// Adds the rows of the plan to `links` and to rank_rows [R, RowColumns()], reading quota once.
template <class Team>
TOPOEP_BODY void AddRows(Team& team, const Problem& problem, const int32_t* quota, int64_t row_bytes,
                         int64_t* rank_rows, const Links& links) {
  const int32_t instances = problem.InstancesPerRank();
  const int32_t columns = RowColumns(problem);
  team.ForEach(problem.num_ranks * problem.num_ranks, [&](int32_t i) {
    const int32_t source = i / problem.num_ranks;
    const int32_t rank = i % problem.num_ranks;
    const int32_t* rows = quota + int64_t{i} * instances;
    const int64_t count = Sum(instances, [&](int32_t j) { return rows[j]; });
    if (columns == 1) {
      team.Add(&rank_rows[rank], count);
    } else {
      for (int32_t j = 0; j < instances; ++j) team.Add(&rank_rows[int64_t{rank} * columns + j], int64_t{rows[j]});
    }
    links.Add(team, source, rank, row_bytes * count);
  });
}

// Picoseconds of the slowest rank, from rank_rows [R, RowColumns()]; one dependent step.
template <class Team>
TOPOEP_BODY int64_t ComputePs(Team& team, const Problem& problem, const int64_t* rank_rows) {
  const int32_t columns = RowColumns(problem);
  const auto key = [&](int32_t rank) { return RankComputePs(problem, rank, rank_rows + rank * columns, columns); };
  return team.ArgMax(problem.num_ranks, key).key;
}

// Picoseconds of the layer under problem.objective; reads only slot_expert [R, N] and quota [R, R, J].
template <class Team>
TOPOEP_STAGE int64_t PredictPs(Team& team, const Problem& problem, const Domains& domains, const int32_t* slot_expert,
                               const int32_t* quota, const CostMemory& memory) {
  const int64_t row_bytes = 2 * problem.cost.token_bytes;
  const Links links(problem, memory.words, memory.bests);
  int64_t* const rank_rows = memory.words + Links::NumWords(problem.num_ranks);
  const int64_t num_instances = CostMemory::NumInstances(problem);
  int64_t* const pull_words = rank_rows + num_instances;
  links.Clear(team);
  team.ForEach(static_cast<int32_t>(num_instances), [&](int32_t i) { rank_rows[i] = 0; });
  team.Sync();
  AddRows(team, problem, quota, row_bytes, rank_rows, links);
  team.Sync();
  const int64_t compute_ps = ComputePs(team, problem, rank_rows);
  const int64_t rows_ps = links.Ps(team, problem.objective);
  team.Sync();  // the pulls use the same links
  Pulls unused{};
  return compute_ps + rows_ps +
         PullPs(team, problem, domains, slot_expert, PullCounts(problem, pull_words), links, unused);
}

}  // namespace topoep
