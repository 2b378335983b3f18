// Planner `topoep` without Python: the lanes do not change the plan, rows are conserved, and no plan costs more than
// the empty one. tests/plan_backends_test.py compares with the reference; here the sanitizers look on.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "xla_ffi/plan/cost.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/solver.h"
#include "xla_ffi/plan/topoep/search.h"

namespace topoep {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int32_t>::max();

// A problem and how hard to search, which own their memory.
struct Instance {
  std::vector<int32_t> domain_of_rank, omega, rank_speed, expert_idx;
  int32_t num_experts = 0;
  int32_t num_slots = 0;
  int32_t top_k = 0;
  Cost cost{};
  int64_t cap_rows = kNoCap;
  int64_t block_rows = 1;
  Objective objective = Objective::kBottleneck;
  std::vector<Candidate> candidates;
  std::vector<int32_t> thrifty, eager;
  Effort effort{};

  Problem View(int32_t threads) {
    Problem problem{};
    problem.num_ranks = static_cast<int32_t>(domain_of_rank.size());
    problem.num_experts = num_experts;
    problem.num_slots = num_slots;
    problem.num_domains = 1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end());
    problem.domain_of_rank = domain_of_rank.data();
    problem.omega = omega.data();
    problem.cost = cost;
    if (!rank_speed.empty()) problem.cost.rank_speed = rank_speed.data();
    problem.cap_rows = cap_rows;
    problem.block_rows = block_rows;
    problem.planner = Planner::kTopoep;
    problem.objective = objective;
    problem.top_k = top_k;
    if (top_k > 0) problem.num_tokens = static_cast<int32_t>(expert_idx.size()) / problem.num_ranks / top_k;
    problem.expert_idx = expert_idx.data();
    effort.candidates = candidates.data();
    effort.num_candidates = static_cast<int32_t>(candidates.size());
    effort.thrifty = thrifty.data();
    effort.num_thrifty = static_cast<int32_t>(thrifty.size());
    effort.eager = eager.data();
    effort.num_eager = static_cast<int32_t>(eager.size());
    problem.effort = &effort;
    problem.num_threads = threads;
    return problem;
  }
};

struct Answer {
  std::vector<int32_t> slot_expert, quota, rank_load, predicted_ps, status;

  bool operator==(const Answer& other) const {
    return std::tie(slot_expert, quota, rank_load, predicted_ps, status) ==
           std::tie(other.slot_expert, other.quota, other.rank_load, other.predicted_ps, other.status);
  }
};

Answer SolveWith(Instance& instance, int32_t threads) {
  const Problem problem = instance.View(threads);
  const int64_t ranks = problem.num_ranks;
  Answer answer{std::vector<int32_t>(ranks * problem.num_slots, 77), std::vector<int32_t>(problem.NumQuotas(), 77),
                std::vector<int32_t>(ranks, 77), std::vector<int32_t>(2, 77), std::vector<int32_t>(1, 77)};
  Solve(problem, Plan{answer.slot_expert.data(), answer.quota.data(), answer.rank_load.data(),
                      answer.predicted_ps.data(), answer.status.data()});
  return answer;
}

class Random {
 public:
  explicit Random(uint32_t seed) : rng_(seed) {}
  int operator()(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
  bool OneIn(int n) { return (*this)(1, n) == 1; }
  template <class T>
  void Shuffle(T& values) {
    std::shuffle(values.begin(), values.end(), rng_);
  }

 private:
  std::mt19937 rng_;
};

void DrawTokens(Random& draw, Instance& instance) {
  const int num_ranks = static_cast<int>(instance.domain_of_rank.size());
  instance.cost.dedup = true;
  instance.top_k = draw(1, std::min(instance.num_experts, 4));
  std::fill(instance.omega.begin(), instance.omega.end(), 0);
  const int tokens = draw(1, 20);
  for (int token = 0; token < num_ranks * tokens; ++token) {
    const size_t first = instance.expert_idx.size();
    for (int k = 0; k < instance.top_k; ++k) {
      int expert = draw(0, draw(0, 1) ? instance.num_experts - 1 : 2 % instance.num_experts);
      const auto chosen = instance.expert_idx.begin() + first;
      if (std::find(chosen, instance.expert_idx.end(), expert) != instance.expert_idx.end()) expert = -1;
      instance.expert_idx.push_back(expert);
      if (expert >= 0) ++instance.omega[token / tokens * instance.num_experts + expert];
    }
  }
}

Instance RandomInstance(uint32_t seed) {
  Random draw(seed);
  Instance instance;
  const int num_ranks = draw(1, 8);
  const int num_domains = draw(1, num_ranks);
  for (int r = 0; r < num_ranks; ++r) instance.domain_of_rank.push_back(r < num_domains ? r : draw(0, num_domains - 1));
  draw.Shuffle(instance.domain_of_rank);
  const int mains = draw(1, 4);
  instance.num_experts = num_ranks * mains;
  instance.num_slots = draw(0, std::min(3, instance.num_experts - mains));
  const int hot = draw(0, instance.num_experts - 1);
  const int sparse = draw(0, 3);
  int64_t total = 0;
  for (int i = 0; i < num_ranks * instance.num_experts; ++i) {
    const int rows = draw(0, 3) < sparse ? 0 : draw(0, 60);
    instance.omega.push_back(i % instance.num_experts == hot ? 20 * rows : rows);
    total += instance.omega.back();
  }
  instance.cost = Cost{draw(1, 3000), draw(1, 8), draw(0, 200), draw(0, 20000), draw(0, 5000)};
  if (draw.OneIn(4)) instance.cost.instance_ps = draw(0, 3000);
  if (draw.OneIn(4)) instance.cost.tile_rows = draw(0, 16);
  if (draw.OneIn(4)) instance.cost.pulls = static_cast<Pulls>(draw(0, 3));
  if (draw.OneIn(4)) {
    for (int r = 0; r < num_ranks; ++r) instance.rank_speed.push_back(draw(500, 1500));
  }
  if (draw.OneIn(5)) DrawTokens(draw, instance);
  instance.block_rows = draw.OneIn(2) ? 1 : draw(2, 16);
  if (draw.OneIn(4)) instance.cap_rows = total / num_ranks + draw(0, static_cast<int>(total / num_ranks / 4 + 1));
  instance.objective = draw.OneIn(4) ? Objective::kEq8 : Objective::kBottleneck;

  instance.candidates = {{kUnlimited, 0, 0, -1, -1}};  // the empty plan
  const bool can_serve = instance.num_slots > 0 && num_ranks > 1;
  for (int c = draw(1, 4); c > 0; --c) {
    instance.candidates.push_back({draw.OneIn(2) ? kUnlimited : draw(1, 4), draw.OneIn(2) ? 0 : draw(1, 14),
                                   can_serve ? draw(0, 16) : 0, draw.OneIn(2) ? -1 : draw(0, 100),
                                   draw.OneIn(4) ? draw(0, 9) : -1});
  }
  for (int i = draw(0, 5); i > 0; --i) instance.thrifty.push_back(draw(0, 3));
  for (int i = draw(0, 5); i > 0; --i) instance.eager.push_back(draw(0, 3));
  instance.effort.fill_moves = draw(0, 6);
  instance.effort.paper = draw.OneIn(2);
  if (draw.OneIn(4)) {
    instance.effort.refine_changes = 40;
    instance.effort.refine_starts = 1;
    instance.effort.refine_waves = 1;
  }
  return instance;
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
    std::vector<int32_t> slots(answer.slot_expert.size());
    std::vector<int32_t> quota(answer.quota.size());
    EmptyPlan(problem, Plan{slots.data(), quota.data(), nullptr, nullptr, nullptr});
    ASSERT_LE(PredictPs(problem, answer.slot_expert.data(), answer.quota.data()),
              PredictPs(problem, slots.data(), quota.data()))
        << "seed " << seed;
  }
  EXPECT_GT(with_replicas, 300);
}

}  // namespace
}  // namespace topoep
