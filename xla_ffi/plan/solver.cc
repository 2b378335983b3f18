#include "xla_ffi/plan/solver.h"

#include <cstdint>

#include "xla_ffi/plan/host_workspace.h"
#include "xla_ffi/plan/solve.h"
#include "xla_ffi/team/thread_team.h"

namespace topoep {
namespace {

template <class Team>
void SolveOn(Team& team, const Problem& problem, const Workspace& work, const Plan& plan) {
  const Memory memory = work.MemoryOf(0);
  Begin(team, work);
  team.Sync();
  for (int32_t run = 0; run < work.NumRuns(); ++run) {
    RunEntry(team, problem, work, memory, run);
    team.Sync();
  }
  Conclude(team, problem, work, memory, plan);
}

}  // namespace

void Solve(const Problem& problem, const Plan& plan) {
  const HostWorkspace workspace(problem);
  const Workspace& work = workspace.Work();
  if (problem.num_threads == 1) {
    SerialTeam team;
    SolveOn(team, problem, work, plan);
  } else {
    RunThreads(problem.num_threads, [&](ThreadTeam& team) { SolveOn(team, problem, work, plan); });
  }
}

}  // namespace topoep
