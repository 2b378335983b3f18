// Planner `topoep` without Python: the lanes do not change the plan, rows are conserved, and no plan costs more than
// the empty one. tests/plan/backends_test.py compares with the reference; here the sanitizers look on.

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/predict.h"
#include "tests/cc/random_instance.h"
#include "xla_ffi/plan/solver.h"

namespace topoep {
namespace {

Answer SolveWith(Instance& instance, int32_t threads) {
  const Problem problem = instance.View(threads);
  Answer answer(problem);
  Solve(problem, answer.View());
  return answer;
}

void ExpectRowsConserved(const Problem& problem, const Answer& answer) {
  std::vector<int64_t> served(int64_t{problem.num_ranks} * problem.num_experts);
  const int32_t mains = problem.MainsPerRank();
  for (int32_t s = 0; s < problem.num_ranks; ++s) {
    for (int32_t r = 0; r < problem.num_ranks; ++r) {
      for (int32_t j = 0; j < problem.InstancesPerRank(); ++j) {
        const int32_t rows = answer.quota[problem.QuotaAt(s, r, j)];
        ASSERT_GE(rows, 0);
        if (rows == 0) continue;
        const int32_t expert = j < mains ? r * mains + j : answer.slot_expert[r * problem.num_slots + j - mains];
        ASSERT_GE(expert, 0) << "rows in a free slot";
        served[int64_t{s} * problem.num_experts + expert] += rows;
      }
    }
  }
  for (size_t i = 0; i < served.size(); ++i) ASSERT_EQ(served[i], problem.omega[i]) << "demand " << i;
}

class LanesTest : public testing::TestWithParam<int32_t> {};

TEST_P(LanesTest, DoNotChangeThePlan) {
  constexpr uint32_t kProblems = 120;
  for (uint32_t seed = GetParam() * 1000; seed < GetParam() * 1000 + kProblems; ++seed) {
    Instance instance = RandomInstance(seed);
    ASSERT_EQ(SolveWith(instance, GetParam()), SolveWith(instance, 1)) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Topoep, LanesTest, testing::Values(2, 3, 4));

TEST(TopoepTest, RowsAreConservedAndNothingCostsMoreThanTheEmptyPlan) {
  int with_replicas = 0;
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    Instance instance = RandomInstance(seed);
    const Answer answer = SolveWith(instance, 1);
    const Problem problem = instance.View(1);
    ExpectRowsConserved(problem, answer);
    if (HasFatalFailure()) FAIL() << "seed " << seed;
    ASSERT_EQ(answer.status[0] & kBadInput, 0);
    with_replicas += (answer.status[0] & kEmpty) == 0;
    if (problem.cap_rows != kNoCap) continue;  // a cap may cost time
    ASSERT_EQ(answer.status[0] & kOverEmptyCost, 0) << "seed " << seed;
    instance.sizes.planner = Planner::kNone;
    const Answer empty = SolveWith(instance, 1);
    ASSERT_LE(PredictPs(problem, answer.slot_expert.data(), answer.quota.data()),
              PredictPs(problem, empty.slot_expert.data(), empty.quota.data()))
        << "seed " << seed;
  }
  EXPECT_GT(with_replicas, 300);
}

}  // namespace
}  // namespace topoep
