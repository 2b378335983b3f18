#include "tests/native/depth.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "xla_ffi/plan/host_workspace.h"
#include "xla_ffi/plan/solve.h"

namespace topoep {
namespace {

constexpr int64_t kKernelBoundaries = 2;

}  // namespace

Depth PlanDepth(const Problem& problem, int32_t threads) {
  const HostWorkspace workspace(problem);
  const Workspace& work = workspace.Work();
  const Memory memory = work.MemoryOf(0);
  std::vector<int32_t> slot_expert(int64_t{problem.num_ranks} * problem.num_slots);
  std::vector<int32_t> quota(problem.NumQuotas());
  std::vector<int32_t> others(problem.num_ranks + 3);
  const Plan plan{slot_expert.data(), quota.data(), others.data(), others.data() + problem.num_ranks,
                  others.data() + problem.num_ranks + 2};

  CountingTeam begin(threads);
  Begin(begin, work);
  Depth depth{};
  Steps longest;
  for (int32_t run = 0; run < work.NumRuns(); ++run) {
    CountingTeam team(threads);
    RunEntry(team, problem, work, memory, run);
    const Steps counted = team.Counted();
    if (run == work.NumCandidates()) {
      depth.paper = counted;
    } else {
      longest.steps = std::max(longest.steps, counted.steps);
      longest.items = std::max(longest.items, counted.items);
    }
  }
  CountingTeam conclude(threads);
  Conclude(conclude, problem, work, memory, plan);
  depth.path.steps = begin.Counted().steps + longest.steps + conclude.Counted().steps + kKernelBoundaries;
  depth.path.items = std::max({begin.Counted().items, longest.items, conclude.Counted().items});
  return depth;
}

}  // namespace topoep
