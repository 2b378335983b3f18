// BlockTeam gives what one lane gives, with a host thread for each thread of the block. What it calls of CUDA is made
// of barriers here, so that a sanitizer sees whether it has enough of its own.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "xla_ffi/team/thread_team.h"

#define __device__

namespace topoep {
namespace {

constexpr int32_t kLanes = 32;

thread_local struct {
  uint32_t x;
} threadIdx;
thread_local ThreadTeamState* block;
thread_local struct Warp {
  ThreadTeamState state{kLanes};
  std::array<int64_t, kLanes> values;
}* warp;

void __syncthreads() { block->Wait(); }
void __syncwarp() { warp->state.Wait(); }

// What `combine` makes of the values of all lanes.
template <class T, class Combine>
T OfWarp(T value, Combine combine) {
  warp->values[threadIdx.x % kLanes] = static_cast<int64_t>(value);
  warp->state.Wait();
  const T result = combine(warp->values);
  warp->state.Wait();
  return result;
}

template <class T>
T __reduce_max_sync(uint32_t, T value) {
  return OfWarp(value, [](const auto& v) { return static_cast<T>(*std::max_element(v.begin(), v.end())); });
}
template <class T>
T __reduce_min_sync(uint32_t, T value) {
  return OfWarp(value, [](const auto& v) { return static_cast<T>(*std::min_element(v.begin(), v.end())); });
}
int64_t __shfl_up_sync(uint32_t, int64_t value, int32_t distance) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanes;
  return OfWarp(value, [&](const auto& v) { return v[lane < distance ? lane : lane - distance]; });
}
template <class T>
void atomicAdd(T* target, T value) {
  __atomic_fetch_add(target, value, __ATOMIC_RELAXED);
}

}  // namespace
}  // namespace topoep

#include "xla_ffi/team/block_team.cuh"

namespace topoep {
namespace {

constexpr int32_t kThreads = 128;

struct Result {
  std::vector<int64_t> filled, mirrored, scanned, each, best;
  int64_t sum = 0;
  int32_t sum32 = 0;
  int64_t singles = 0;

  bool operator==(const Result& other) const {
    return filled == other.filled && mirrored == other.mirrored && scanned == other.scanned && each == other.each &&
           best == other.best && sum == other.sum && sum32 == other.sum32 && singles == other.singles;
  }
};

struct Case {
  int32_t n;
  int32_t segments;
  std::vector<int64_t> keys;  // [segments, n]
};

Result Empty(const Case& c) {
  Result result;
  result.filled.resize(c.n);
  result.mirrored.resize(c.n);
  result.scanned.resize(c.segments * c.n);
  result.each.resize(c.segments);
  result.best.resize(2 * c.segments);
  return result;
}

// Everything twice, so that one use could disturb the next.
template <class Team>
void Body(Team& team, const Case& c, Result& result) {
  const auto key = [&](int32_t s, int32_t i) { return c.keys[s * c.n + i]; };
  for (int32_t round = 0; round < 2; ++round) {
    team.ForEach(c.n, [&](int32_t i) { result.filled[i] += 3 * i + round; });
    team.ForEach(c.n, [&](int32_t i) { team.Add(&result.sum, int64_t{i} * -7); });
    team.ForEach(c.n, [&](int32_t i) { team.Add(&result.sum32, i); });
    team.Single([&] { ++result.singles; });
    team.Sync();
    team.ForEach(c.n, [&](int32_t i) { result.mirrored[i] = result.filled[c.n - 1 - i]; });
    for (int32_t s = 0; s < c.segments; ++s) {
      const Best best = team.ArgMax(c.n, [&](int32_t i) { return key(s, i); });
      team.Single([&] {
        result.best[2 * s] = best.key;
        result.best[2 * s + 1] = best.index;
      });
    }
    team.ArgMaxEach(
        c.segments, c.n, [&](int32_t s, int32_t i) { return key(s, i) + 0 * result.filled[i]; },
        [&](int32_t s, Best best) { result.each[s] += best.Found() ? 1000 * best.key + best.index : -1; });
    team.ScanEach(c.segments, c.n, [&](int32_t s, int32_t i) { return result.each[s] % 5 + i; }, result.scanned.data());
    team.ForEach(c.n, [&](int32_t i) { result.filled[i] += result.scanned[c.segments * c.n - 1 - i]; });
  }
}

Result OnBlock(const Case& c) {
  Result result = Empty(c);
  BlockTeam<kThreads>::Partials partials;
  ThreadTeamState state(kThreads);
  std::vector<Warp> warps(kThreads / kLanes);
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx.x = static_cast<uint32_t>(t);
      block = &state;
      warp = &warps[t / kLanes];
      BlockTeam<kThreads> team(partials);
      Body(team, c, result);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

TEST(BlockTeamTest, GivesWhatOneLaneGives) {
  std::mt19937_64 rng(1);
  const auto draw = [&rng](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  // Fewer and more items than lanes, segments that share the warps and warps that share the segments.
  for (const auto& [n, segments] : std::vector<std::pair<int32_t, int32_t>>{
           {0, 2}, {1, 1}, {5, 9}, {31, 3}, {33, 2}, {40, 1}, {64, 3}, {129, 1}, {200, 2}, {150, 5}, {97, 4}}) {
    Case c{n, segments, {}};
    for (int32_t i = 0; i < n * segments; ++i) {
      const int64_t kind = draw(0, 9);
      c.keys.push_back(kind == 0  ? kNoKey
                       : kind < 4 ? draw(-2, 2)
                       : kind < 7 ? draw(0, 1) * (int64_t{1} << 40) - draw(0, 3)
                                  : draw(-1, 1) * (int64_t{1} << 32));
    }
    Result expected = Empty(c);
    SerialTeam one;
    Body(one, c, expected);
    EXPECT_EQ(OnBlock(c), expected) << n << " items, " << segments << " segments";
  }
}

}  // namespace
}  // namespace topoep
