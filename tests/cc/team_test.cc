// Every team gives what one lane gives.

#include "xla_ffi/team/team.h"

#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/native/counting_team.h"
#include "xla_ffi/team/thread_team.h"

namespace topoep {
namespace {

// What a body computed; every lane must agree on what ArgMax() returns.
struct Result {
  std::vector<int64_t> filled, scanned, each, after;
  std::vector<Best> best_of_lane;
  int64_t sum = 0;
  int64_t singles = 0;

  bool operator==(const Result& other) const {
    return filled == other.filled && scanned == other.scanned && each == other.each && after == other.after &&
           sum == other.sum && singles == other.singles;
  }
};

struct Case {
  int32_t n;
  int32_t segments;
  std::vector<int64_t> keys;  // [segments, n], few values so that they tie; some kNoKey
};

template <class Team>
void Body(Team& team, int32_t lane, const Case& c, Result& result) {
  team.ForEach(c.n, [&](int32_t i) { result.filled[i] = 3 * i; });
  team.ForEach(c.n, [&](int32_t i) { result.filled[i] += 1; });  // the same lane again: no barrier
  team.ForEach(c.n, [&](int32_t i) { team.Add(&result.sum, int64_t{i} * i); });
  team.Single([&] { ++result.singles; });
  team.Sync();
  for (int32_t s = 0; s < c.segments; ++s) {  // back to back
    const Best best = team.ArgMax(c.n, [&](int32_t i) { return c.keys[s * c.n + i] + 0 * result.filled[i]; });
    if (s + 1 == c.segments) result.best_of_lane[lane] = best;
  }
  team.ArgMaxEach(
      c.segments, c.n, [&](int32_t s, int32_t i) { return c.keys[s * c.n + i]; },
      [&](int32_t s, Best best) { result.each[s] += best.Found() ? 1000 * best.key + best.index : -1; });
  // Reads what other lanes left above.
  team.ForEach(c.segments, [&](int32_t s) { result.after[s] = result.each[c.segments - 1 - s]; });
  team.ScanEach(
      c.segments, c.n, [&](int32_t s, int32_t i) { return c.keys[s * c.n + i] == kNoKey ? 1 : result.filled[i]; },
      result.scanned.data());
  team.ForEach(c.segments, [&](int32_t s) {
    if (c.n > 0) result.after[s] += result.scanned[(c.segments - 1 - s) * c.n + c.n - 1];
  });
}

Result Empty(const Case& c, int32_t lanes) {
  Result result;
  result.filled.resize(c.n);
  result.scanned.resize(c.segments * c.n);
  result.each.resize(c.segments);
  result.after.resize(c.segments);
  result.best_of_lane.resize(lanes);
  return result;
}

TEST(TeamTest, EveryTeamGivesTheSame) {
  std::mt19937 rng(1);
  const auto draw = [&rng](int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); };
  for (int i = 0; i < 60; ++i) {
    Case c{draw(0, 9), draw(1, 6), {}};
    for (int k = 0; k < c.n * c.segments; ++k) c.keys.push_back(draw(0, 2) == 0 ? kNoKey : draw(-1, 1));
    Result serial = Empty(c, 1);
    SerialTeam one;
    Body(one, 0, c, serial);
    Result counted = Empty(c, 1);
    CountingTeam counting(4);
    Body(counting, 0, c, counted);
    ASSERT_EQ(counted, serial);
    EXPECT_EQ(counting.Counted().steps, 1 + c.segments + 2);
    for (int32_t lanes = 1; lanes <= 4; ++lanes) {
      Result result = Empty(c, lanes);
      ThreadTeamState state(lanes);
      std::vector<std::thread> threads;
      for (int32_t lane = 0; lane < lanes; ++lane) {
        threads.emplace_back([&, lane] {
          ThreadTeam team(state, lane);
          Body(team, lane, c, result);
        });
      }
      for (std::thread& thread : threads) thread.join();
      ASSERT_EQ(result, serial) << "case " << i << ", " << lanes << " lanes";
      for (const Best& best : result.best_of_lane) {
        ASSERT_EQ(best.key, serial.best_of_lane[0].key);
        ASSERT_EQ(best.index, serial.best_of_lane[0].index);
      }
    }
  }
}

TEST(TeamTest, TheLowerIndexWinsATie) {
  const std::vector<int64_t> keys{1, 5, 2, 5, 5};
  RunThreads(3, [&](ThreadTeam& team) {
    const Best best = team.ArgMax(5, [&](int32_t i) { return keys[i]; });
    EXPECT_EQ(best.index, 1);
    EXPECT_FALSE(team.ArgMax(5, [](int32_t) { return kNoKey; }).Found());
  });
}

TEST(CountingTeamTest, TakesTheBusiestThreadBetweenTwoSteps) {
  CountingTeam team(4);
  team.ForEach(5, [](int32_t) {});
  team.ForEach(1, [](int32_t) {});
  team.Sync();
  team.ForEach(4, [](int32_t) {});
  EXPECT_EQ(team.Counted().steps, 1);
  EXPECT_EQ(team.Counted().items, 3);
}

}  // namespace
}  // namespace topoep
