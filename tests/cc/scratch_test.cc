// The way of a plan on a device, with a host thread for each block: tables and workspace in one piece of memory, which
// is all that the bodies may read beside demand and tokens.

#include "xla_ffi/plan/scratch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/random_instance.h"
#include "xla_ffi/plan/solve.h"
#include "xla_ffi/plan/solver.h"

namespace topoep {
namespace {

constexpr std::byte kGarbage{0xa5};

// body(team, problem, work, memory) as block `block`, which has its own copy of both in its shared memory.
template <class Body>
void RunBlock(const Problem& given, const Workspace& given_work, int32_t block, Body body) {
  const Problem problem = given;
  Workspace work = given_work;
  work.context.problem = &problem;
  const Memory memory = work.MemoryOf(block);
  SerialTeam team;
  body(team, problem, work, memory);
}

Answer SolveOnBlocks(Instance instance) {
  const Problem host = instance.View(1);
  Answer answer(host);
  const DomainTable domains(host);
  const int64_t bytes = Scratch(host, domains.View(), nullptr).bytes;
  std::vector<std::byte> memory(bytes + 64, kGarbage);
  const Scratch layout(host, domains.View(), memory.data());
  EXPECT_EQ(layout.bytes, bytes);
  const std::vector<std::byte> tables = PackTables(host, domains.View());
  std::copy(tables.begin(), tables.end(), memory.begin());
  // Whoever still reads the host's tables reads nonsense.
  std::fill(instance.domain_of_rank.begin(), instance.domain_of_rank.end(), -99);
  std::fill(instance.rank_speed.begin(), instance.rank_speed.end(), -99);
  std::fill(instance.candidates.begin(), instance.candidates.end(), Candidate{-99, -99, -99, -99, -99});
  std::fill(instance.thrifty.begin(), instance.thrifty.end(), -99);
  std::fill(instance.eager.begin(), instance.eager.end(), -99);

  RunBlock(layout.problem, layout.work, 0,
           [](SerialTeam& team, const Problem&, const Workspace& w, const Memory&) { Begin(team, w); });
  std::vector<std::thread> blocks;
  for (int32_t block = 0; block < layout.blocks; ++block) {
    blocks.emplace_back([&, block] {
      RunBlock(layout.problem, layout.work, block,
               [&](SerialTeam& team, const Problem& p, const Workspace& w, const Memory& m) {
                 for (int32_t run = block; run < w.NumRuns(); run += layout.blocks) RunEntry(team, p, w, m, run);
               });
    });
  }
  for (std::thread& block : blocks) block.join();
  RunBlock(layout.problem, layout.work, 0,
           [&](SerialTeam& team, const Problem& p, const Workspace& w, const Memory& m) {
             Conclude(team, p, w, m, answer.View());
           });
  EXPECT_TRUE(std::all_of(memory.begin() + bytes, memory.end(), [](std::byte b) { return b == kGarbage; }));
  return answer;
}

TEST(ScratchTest, BlocksSideBySideGiveThePlanOfTheHost) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    Instance instance = RandomInstance(seed);
    instance.sizes.planner = static_cast<Planner>(seed % 6 < 4 ? 2 : seed % 6 - 4);
    if (seed % 10 == 9) instance.omega[0] = -1;  // refused
    const Problem problem = instance.View(1);
    Answer expected(problem);
    Solve(problem, expected.View());
    EXPECT_EQ(SolveOnBlocks(instance), expected) << "seed " << seed;
  }
}

TEST(ScratchTest, BlocksAreAsManyAsEntriesAndMemoryAllow) {
  Instance instance = RandomInstance(1);
  instance.sizes.planner = Planner::kTopoep;
  const auto layout = [&](int32_t ranks, int32_t experts, int32_t candidates) {
    instance.domain_of_rank.assign(ranks, 0);
    instance.rank_speed.clear();
    instance.sizes.num_experts = experts;
    instance.sizes.num_slots = 2;
    instance.candidates.assign(candidates, Candidate{kUnlimited, 0, 8, -1, -1});
    instance.sizes.effort.paper = true;
    const Problem problem = instance.View(1);
    const DomainTable domains(problem);
    return Scratch(problem, domains.View(), nullptr);
  };
  EXPECT_EQ(layout(8, 16, 14).blocks, 15);
  EXPECT_EQ(layout(8, 16, 1000).blocks, Scratch::kMaxBlocks);
  const Scratch large = layout(128, 640, 1000);
  EXPECT_LT(large.blocks, Scratch::kMaxBlocks);
  EXPECT_LE(large.blocks * large.work.memory_bytes, Scratch::kMaxBytesOfBlocks);
  EXPECT_EQ(layout(512, 2048, 2).blocks, 1);
}

}  // namespace
}  // namespace topoep
