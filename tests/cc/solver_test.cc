// The planner without Python: vectors by hand, conservation and repeatability on random demand, refusals.
// tests/plan/vectors_test.py holds every vector and tests/plan/backends_test.py compares with the reference; these run
// in seconds under Bazel and CTest, also with sanitizers.

#include "xla_ffi/plan/solver.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace topoep {
namespace {

// A problem or an answer that owns its memory.
struct Instance {
  std::vector<int32_t> domain_of_rank;
  int32_t num_experts;
  int32_t num_slots;
  std::vector<int32_t> omega;
  CostModel cost{24, 4, 0, 20000, 5000};  // hidden 2, ffn 2: a replica pays from 4 rows on
  int64_t cap_rows = kNoCap;
  int64_t block_rows = 1;
  Planner planner = Planner::kTopoepPaper;
  Objective objective = Objective::kBottleneck;

  Problem View() const {
    const int32_t num_domains = 1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end());
    return Problem{static_cast<int32_t>(domain_of_rank.size()),
                   num_experts,
                   num_slots,
                   num_domains,
                   domain_of_rank.data(),
                   omega.data(),
                   cost,
                   cap_rows,
                   block_rows,
                   planner,
                   objective};
  }
};

using Quotas = std::map<std::tuple<int, int, int>, int>;  // (source, rank, instance) -> rows

struct Answer {
  std::vector<int32_t> slot_expert, quota, rank_load, predicted_ps, status;

  bool operator==(const Answer& other) const {
    return std::tie(slot_expert, quota, rank_load, predicted_ps, status) ==
           std::tie(other.slot_expert, other.quota, other.rank_load, other.predicted_ps, other.status);
  }
};

// Starts from garbage, since Solve() must write every element.
Answer SolveInstance(const Instance& instance) {
  const Problem problem = instance.View();
  const int64_t num_ranks = problem.num_ranks;
  Answer answer{std::vector<int32_t>(num_ranks * problem.num_slots, 77), std::vector<int32_t>(problem.NumQuotas(), 77),
                std::vector<int32_t>(num_ranks, 77), std::vector<int32_t>(2, 77), std::vector<int32_t>(1, 77)};
  Solve(problem, Plan{answer.slot_expert.data(), answer.quota.data(), answer.rank_load.data(),
                      answer.predicted_ps.data(), answer.status.data()});
  return answer;
}

Quotas NonZero(const Problem& problem, const Answer& answer) {
  Quotas quotas;
  for (int s = 0; s < problem.num_ranks; ++s) {
    for (int r = 0; r < problem.num_ranks; ++r) {
      for (int j = 0; j < problem.InstancesPerRank(); ++j) {
        if (const int rows = answer.quota[problem.QuotaAt(s, r, j)]; rows != 0) quotas[{s, r, j}] = rows;
      }
    }
  }
  return quotas;
}

int64_t Picoseconds(const Answer& answer) {
  return int64_t{answer.predicted_ps[0]} * (int64_t{1} << 32) + static_cast<uint32_t>(answer.predicted_ps[1]);
}

const Instance kVectorA{{0, 0, 1, 1}, 4, 1, {6, 0, 8, 0, 0, 6, 0, 0, 0, 0, 0, 10, 0, 0, 10, 0}};
const Instance kVectorB{{0, 0}, 2, 1, {7, 0, 4, 0}};
const Instance kVectorF{{0, 1, 2}, 3, 1, {0, 0, 0, 5, 0, 0, 3, 0, 0}};

TEST(SolverTest, ReplicasForTrafficThenForBalance) {
  const Answer answer = SolveInstance(kVectorA);
  EXPECT_EQ(answer.slot_expert, (std::vector<int32_t>{2, 0, -1, -1}));
  EXPECT_EQ(answer.rank_load, (std::vector<int32_t>{10, 10, 10, 10}));
  EXPECT_EQ(NonZero(kVectorA.View(), answer),
            (Quotas{{{0, 0, 0}, 2}, {{0, 0, 1}, 8}, {{0, 1, 1}, 4}, {{1, 1, 0}, 6}, {{2, 3, 0}, 10}, {{3, 2, 0}, 10}}));
  EXPECT_EQ(Picoseconds(answer), 8 * 10 * 5 + 24 * 20 + 24 * 5);
  EXPECT_EQ(answer.status[0], kCapMet);
}

TEST(SolverTest, HalfOfAnOddGapRoundsDown) {
  const Answer answer = SolveInstance(kVectorB);
  EXPECT_EQ(answer.slot_expert, (std::vector<int32_t>{-1, 0}));
  EXPECT_EQ(NonZero(kVectorB.View(), answer), (Quotas{{{0, 0, 0}, 2}, {{0, 1, 1}, 5}, {{1, 0, 0}, 4}}));
  EXPECT_EQ(answer.status[0], kCapMet | kOverEmptyCost);
}

TEST(SolverTest, TheOddRowStartsAtItsSourcesTurn) {
  const Answer answer = SolveInstance(kVectorF);
  EXPECT_EQ(answer.slot_expert, (std::vector<int32_t>{-1, 0, -1}));
  EXPECT_EQ(NonZero(kVectorF.View(), answer), (Quotas{{{1, 1, 1}, 5}, {{2, 0, 0}, 2}, {{2, 1, 1}, 1}}));
}

TEST(SolverTest, NoneKeepsEverythingOnTheMains) {
  Instance instance = kVectorA;
  instance.planner = Planner::kNone;
  const Answer answer = SolveInstance(instance);
  EXPECT_EQ(answer.slot_expert, std::vector<int32_t>(4, -1));
  EXPECT_EQ(answer.rank_load, (std::vector<int32_t>{6, 6, 18, 10}));
  EXPECT_EQ(answer.status[0], kCapMet | kEmpty);
  EXPECT_EQ(Picoseconds(answer), 8 * 8 * 20 + 8 * 10 * 5);
}

TEST(SolverTest, DomainNumbersMayLeaveGaps) {
  Instance instance = kVectorA;
  instance.domain_of_rank = {3, 3, 1, 1};
  EXPECT_EQ(SolveInstance(instance), SolveInstance(kVectorA));
}

TEST(SolverTest, CapCountsAlignedRows) {
  Instance instance = kVectorA;
  instance.block_rows = 4;
  instance.cap_rows = 12;
  EXPECT_TRUE(SolveInstance(instance).status[0] & kCapMet);
  instance.cap_rows = 11;
  EXPECT_FALSE(SolveInstance(instance).status[0] & kCapMet);
}

TEST(SolverTest, LargestDemandAndTimeFitSixtyFourBits) {
  Instance instance{{0, 1}, 2, 0, {0, static_cast<int32_t>(kMaxRows), 0, 0}};
  instance.cost = CostModel{int64_t{1} << 30, 1 << 16, int64_t{1} << 30, 20000, 5000};
  const Answer answer = SolveInstance(instance);
  EXPECT_EQ(answer.rank_load[1], kMaxRows);
  EXPECT_EQ(Picoseconds(answer), (int64_t{1} << 30) * kMaxRows + int64_t{2} * (1 << 16) * kMaxRows * 20);
}

TEST(SolverTest, BadDemandIsRefused) {
  Instance negative = kVectorA;
  negative.omega[5] = -1;
  Instance large = kVectorA;
  large.omega[0] = static_cast<int32_t>(kMaxRows);
  for (const Instance& instance : {negative, large}) {
    const Answer answer = SolveInstance(instance);
    EXPECT_EQ(answer.status[0], kBadInput | kEmpty);
    EXPECT_EQ(answer.slot_expert, std::vector<int32_t>(4, -1));
    for (const auto* field : {&answer.quota, &answer.rank_load, &answer.predicted_ps}) {
      EXPECT_EQ(*field, std::vector<int32_t>(field->size(), 0));
    }
  }
}

Instance RandomInstance(std::mt19937& rng) {
  const auto draw = [&rng](int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); };
  Instance instance;
  const int num_ranks = draw(1, 8);
  const int num_domains = draw(1, num_ranks);
  for (int r = 0; r < num_ranks; ++r) instance.domain_of_rank.push_back(r < num_domains ? r : draw(0, num_domains - 1));
  std::shuffle(instance.domain_of_rank.begin(), instance.domain_of_rank.end(), rng);
  instance.num_experts = num_ranks * draw(1, 4);
  instance.num_slots = draw(0, std::min(4, instance.num_experts - instance.num_experts / num_ranks));
  const int hot = draw(0, instance.num_experts - 1);
  for (int i = 0; i < num_ranks * instance.num_experts; ++i) {
    const int rows = draw(0, 2) == 0 ? 0 : draw(0, 40);
    instance.omega.push_back(i % instance.num_experts == hot ? 20 * rows : rows);
  }
  instance.cost.expert_bytes = draw(1, 1000);
  instance.objective = draw(0, 1) ? Objective::kEq8 : Objective::kBottleneck;
  return instance;
}

// Laws 1 to 3 and 5; the others need the reference, in Python.
void ExpectLegal(const Instance& instance, const Answer& answer) {
  const Problem problem = instance.View();
  const int mains = problem.MainsPerRank();
  std::vector<int64_t> served(instance.omega.size());
  for (int r = 0; r < problem.num_ranks; ++r) {
    int32_t previous = -1;
    bool ended = false;
    int64_t load = 0;
    for (int j = 0; j < problem.InstancesPerRank(); ++j) {
      const int32_t expert = j < mains ? r * mains + j : answer.slot_expert[r * problem.num_slots + j - mains];
      int64_t rows = 0;
      for (int s = 0; s < problem.num_ranks; ++s) {
        const int32_t quota = answer.quota[problem.QuotaAt(s, r, j)];
        ASSERT_GE(quota, 0);
        rows += quota;
        if (quota > 0) served[s * problem.num_experts + std::max(expert, 0)] += quota;
      }
      load += rows;
      if (j < mains) continue;
      ended |= expert < 0;
      ASSERT_EQ(rows > 0, expert >= 0) << "rank " << r << ", slot " << j - mains;
      if (expert < 0) continue;
      ASSERT_FALSE(ended) << "rank " << r << " has an empty slot before a filled one";
      ASSERT_NE(problem.MainRank(expert), r);
      ASSERT_GT(expert, previous);
      previous = expert;
    }
    ASSERT_EQ(load, answer.rank_load[r]);
  }
  for (size_t i = 0; i < served.size(); ++i) ASSERT_EQ(served[i], instance.omega[i]) << "demand " << i;
}

TEST(SolverTest, RandomPlansAreLegalAndRepeatable) {
  std::mt19937 rng(1);
  int with_replicas = 0;
  for (int i = 0; i < 2000; ++i) {
    const Instance instance = RandomInstance(rng);
    const Answer answer = SolveInstance(instance);
    ExpectLegal(instance, answer);
    if (HasFatalFailure()) FAIL() << "instance " << i;
    ASSERT_EQ(answer, SolveInstance(instance)) << "instance " << i;
    with_replicas += (answer.status[0] & kEmpty) == 0;
  }
  EXPECT_GT(with_replicas, 1000);
}

}  // namespace
}  // namespace topoep
