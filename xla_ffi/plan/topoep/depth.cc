#include "xla_ffi/plan/topoep/depth.h"

#include <algorithm>
#include <cstdint>

#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/topoep/candidate.h"
#include "xla_ffi/plan/topoep/context.h"

namespace topoep {
namespace {

// After the longest candidate: its entries are seen, one is chosen, and its plan is copied.
constexpr int64_t kChoiceSteps = 3;

}  // namespace

Steps PlanDepth(const Problem& problem, const Effort& effort, int32_t threads) {
  Arena arena;
  const DomainTable domains(problem);
  const Context context(problem, domains.View(), arena);
  const Memory memory(context, effort.num_candidates * kPhases + 1, arena);
  CountingTeam prepare(threads);
  Prepare(prepare, context);
  Steps longest;
  for (int32_t i = 0; i < effort.num_candidates; ++i) {
    CountingTeam team(threads);
    RunCandidate(team, context, effort, i, kPhases - 1, true, memory);
    longest.steps = std::max(longest.steps, team.Counted().steps);
    longest.items = std::max(longest.items, team.Counted().items);
  }
  const Steps shared = prepare.Counted();
  return {shared.steps + longest.steps + kChoiceSteps, std::max(shared.items, longest.items)};
}

}  // namespace topoep
