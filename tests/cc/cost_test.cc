// The cost model without Python: the vectors of tests/plan/cost_test.py and tests/plan/pulls_test.py, and the largest
// values. tests/plan/cost_test.py compares both languages on random plans.

#include "xla_ffi/plan/cost.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/predict.h"

namespace topoep {
namespace {

// A problem and a plan for it that own their memory.
struct Instance {
  std::vector<int32_t> domain_of_rank;
  int32_t num_experts;
  int32_t num_slots;
  CostModel cost;
  std::vector<int32_t> slot_expert;
  std::vector<int32_t> quota = {};
  Objective objective = Objective::kBottleneck;

  Problem View() const {
    const int32_t num_ranks = static_cast<int32_t>(domain_of_rank.size());
    Problem problem{};
    problem.num_ranks = num_ranks;
    problem.num_experts = num_experts;
    problem.num_slots = num_slots;
    problem.num_domains = 1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end());
    problem.domain_of_rank = domain_of_rank.data();
    problem.cost = cost;
    problem.objective = objective;
    return problem;
  }

  void SetRows(int32_t source, int32_t rank, int32_t instance, int32_t rows) {
    const Problem problem = View();
    quota.resize(problem.NumQuotas());
    quota[problem.QuotaAt(source, rank, instance)] = rows;
  }

  int64_t Ps(Objective asked) {
    objective = asked;
    const Problem problem = View();
    quota.resize(problem.NumQuotas());
    return PredictPs(problem, slot_expert.data(), quota.data());
  }
  int64_t BottleneckPs() { return Ps(Objective::kBottleneck); }
  int64_t Eq8Ps() { return Ps(Objective::kEq8); }
};

constexpr int64_t kTrafficPs = 8 * 10 * 5 + 24 * 20 + 24 * 5;

Instance VectorA() {
  Instance instance{{0, 0, 1, 1}, 4, 1, CostModel{24, 4, 100, 20000, 5000}, {2, 0, -1, -1}};
  instance.SetRows(0, 0, 0, 2);
  instance.SetRows(0, 0, 1, 8);
  instance.SetRows(0, 1, 1, 4);
  instance.SetRows(1, 1, 0, 6);
  instance.SetRows(2, 3, 0, 10);
  instance.SetRows(3, 2, 0, 10);
  return instance;
}

TEST(CostTest, WithoutOptionalTerms) {
  Instance instance = VectorA();
  EXPECT_EQ(instance.BottleneckPs(), 1000 + kTrafficPs);
  EXPECT_EQ(instance.Eq8Ps(), 1000 + kTrafficPs + 8 * 14 * 5);
}

TEST(CostTest, ActiveInstancesTakeTime) {
  for (const auto& [instance_ps, expected] : std::vector<std::pair<int64_t, int64_t>>{{400, 1000}, {700, 1400}}) {
    Instance instance = VectorA();
    instance.cost.instance_ps = instance_ps;
    EXPECT_EQ(instance.BottleneckPs(), expected + kTrafficPs);
  }
}

TEST(CostTest, TilesArePadded) {
  for (const auto& [tile_rows, expected] : std::vector<std::pair<int64_t, int64_t>>{{1, 1000}, {4, 1200}, {5, 1500}}) {
    Instance instance = VectorA();
    instance.cost.tile_rows = tile_rows;
    EXPECT_EQ(instance.BottleneckPs(), expected + kTrafficPs);
  }
}

TEST(CostTest, SlowRanksTakeLonger) {
  const std::vector<int32_t> second_slow{1000, 800, 1000, 2000};
  const std::vector<int32_t> last_slow{1000, 1000, 1000, 700};
  Instance instance = VectorA();
  instance.cost.rank_speed = second_slow.data();
  EXPECT_EQ(instance.BottleneckPs(), 1250 + kTrafficPs);
  instance.cost.instance_ps = 700;
  instance.cost.tile_rows = 5;
  EXPECT_EQ(instance.BottleneckPs(), 1875 + kTrafficPs);
  instance = VectorA();
  instance.cost.rank_speed = last_slow.data();
  EXPECT_EQ(instance.BottleneckPs(), 1428 + kTrafficPs);
}

TEST(CostTest, PullsAreScheduled) {
  Instance instance{{0, 0, 0, 1, 1, 1}, 6, 1, CostModel{10, 1, 0, 20000, 5000}, {4, 0, -1, 0, -1, 0}};
  EXPECT_EQ(instance.BottleneckPs(), 20 * 20 + 10 * 5);
  EXPECT_EQ(instance.Eq8Ps(), 30 * 20 + 10 * 5);
  instance.cost.pulls = Pulls::kRelayed;
  EXPECT_EQ(instance.BottleneckPs(), 10 * 20 + 10 * 5);
  EXPECT_EQ(instance.Eq8Ps(), 20 * 20 + 20 * 5);
  instance.cost.pulls = Pulls::kStriped;
  EXPECT_EQ(instance.BottleneckPs(), 10 * 20 + 14 * 5);
  EXPECT_EQ(instance.Eq8Ps(), 20 * 20 + 31 * 5);
  instance.cost.pulls = Pulls::kBest;
  EXPECT_EQ(instance.BottleneckPs(), 10 * 20 + 10 * 5);
  EXPECT_EQ(instance.Eq8Ps(), 20 * 20 + 20 * 5);
}

// Lanes may run in any order: here the last goes first.
class BackwardTeam : public SerialTeam {
 public:
  template <class F>
  void ForEach(int32_t n, F f) {
    for (int32_t i = n - 1; i >= 0; --i) f(i);
  }
};

TEST(CostTest, TheOrderOfLanesDoesNotMatter) {
  std::mt19937 rng(1);
  const auto draw = [&rng](int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); };
  for (int i = 0; i < 500; ++i) {
    Instance instance{
        {}, 0, draw(1, 3), CostModel{draw(1, 99), draw(1, 9), draw(0, 9), draw(0, 20000), draw(0, 5000)}, {}};
    const int num_ranks = draw(2, 8);
    for (int r = 0; r < num_ranks; ++r) instance.domain_of_rank.push_back(draw(0, 2));
    instance.num_experts = 2 * num_ranks;
    for (int r = 0; r < num_ranks; ++r) {
      int32_t expert = 0;  // ascending and never one of the rank's own two
      for (int slot = 0; slot < instance.num_slots; ++slot, expert += 2) {
        expert += draw(0, 1) + (expert / 2 == r ? 2 : 0);
        instance.slot_expert.push_back(expert < instance.num_experts && expert / 2 != r ? expert : -1);
      }
    }
    for (int64_t at = 0; at < instance.View().NumQuotas(); ++at) instance.quota.push_back(draw(0, 9));
    instance.cost.instance_ps = draw(0, 50);
    instance.cost.tile_rows = draw(0, 4);
    instance.cost.pulls = static_cast<Pulls>(draw(0, 3));
    instance.objective = static_cast<Objective>(draw(0, 1));
    const Problem problem = instance.View();
    const DomainTable domains(problem);
    std::vector<int64_t> words(CostMemory::NumWords(problem), 77);
    std::vector<Best> bests(Links::kNumBests);
    BackwardTeam team;
    const int64_t ps = PredictPs(team, problem, domains.View(), instance.slot_expert.data(), instance.quota.data(),
                                 CostMemory{words.data(), bests.data()});
    ASSERT_EQ(ps, PredictPs(problem, instance.slot_expert.data(), instance.quota.data())) << "instance " << i;
  }
}

TEST(CostTest, ComputeAtItsLimitFitsSixtyFourBits) {
  for (const int32_t slowest : {1, 333, 1000, 5000}) {
    for (const int64_t tile_rows : {0, 128}) {
      const int64_t rows = MaxPaddedRows(tile_rows);
      Problem problem{};
      problem.cost = CostModel{1, 1, ComputeLimit(rows, slowest), 1, 1};
      problem.cost.rank_speed = &slowest;
      problem.cost.tile_rows = tile_rows;
      const long double exact = static_cast<long double>(problem.cost.row_ps) * rows * 1000 / slowest;
      EXPECT_LE(exact, static_cast<long double>(std::numeric_limits<int64_t>::max()) / 2);
      EXPECT_NEAR(static_cast<long double>(RankComputePs(problem, 0, &rows, 1)) / exact, 1, 1e-9);
    }
  }
}

}  // namespace
}  // namespace topoep
