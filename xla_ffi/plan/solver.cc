#include "xla_ffi/plan/solver.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "xla_ffi/plan/dedup.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/paper.h"
#include "xla_ffi/plan/topoep/search.h"

namespace topoep {
namespace {

bool DemandIsValid(const Problem& problem) {
  const int64_t size = int64_t{problem.num_ranks} * problem.num_experts;
  int64_t total = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (problem.omega[i] < 0) return false;
    total += problem.omega[i];
    if (total > kMaxRows) return false;
  }
  return true;
}

bool TokensAreValid(const Problem& problem) {
  if (!problem.cost.dedup) return true;
  std::vector<int64_t> counts(problem.num_experts);
  return TokensMatchDemand(problem, counts.data());
}

void Refuse(const Problem& problem, const Plan& plan) {
  std::fill_n(plan.slot_expert, int64_t{problem.num_ranks} * problem.num_slots, -1);
  std::fill_n(plan.quota, problem.NumQuotas(), 0);
  std::fill_n(plan.rank_load, problem.num_ranks, 0);
  std::fill_n(plan.predicted_ps, 2, 0);
  *plan.status = kBadInput | kEmpty;
}

}  // namespace

void Solve(const Problem& problem, const Plan& plan) {
  if (!DemandIsValid(problem) || !TokensAreValid(problem)) {
    Refuse(problem, plan);
    return;
  }
  switch (problem.planner) {
    case Planner::kNone:
      EmptyPlan(problem, plan);
      break;
    case Planner::kTopoepPaper:
      PaperPlan(problem, plan);
      break;
    case Planner::kTopoep:
      TopoepPlan(problem, *problem.effort, problem.num_threads, plan);
      break;
  }
  Finish(problem, plan);
}

}  // namespace topoep
