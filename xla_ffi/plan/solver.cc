#include "xla_ffi/plan/solver.h"

#include <cstddef>
#include <cstdint>
#include <memory>

#include "xla_ffi/plan/solve.h"
#include "xla_ffi/team/thread_team.h"

namespace topoep {
namespace {

template <class Team>
void SolveOn(Team& team, const Problem& problem, const Workspace& work, const Plan& plan) {
  const Memory memory = work.MemoryOf(0);
  Begin(team, problem, work);
  team.Sync();
  for (int32_t run = 0; run < work.NumRuns(); ++run) {
    RunEntry(team, problem, work, memory, run);
    team.Sync();
  }
  Conclude(team, problem, work, memory, plan);
}

}  // namespace

void Solve(const Problem& problem, const Plan& plan) {
  const DomainTable domains(problem);
  const auto lay_out = [&](Arena& arena) { return Workspace(problem, domains.View(), 1, arena); };
  Arena measure;
  lay_out(measure);
  const std::unique_ptr<std::byte[]> bytes(new std::byte[measure.Used()]);
  Arena arena(bytes.get());
  const Workspace work = lay_out(arena);
  if (problem.num_threads == 1) {
    SerialTeam team;
    SolveOn(team, problem, work, plan);
  } else {
    RunThreads(problem.num_threads, [&](ThreadTeam& team) { SolveOn(team, problem, work, plan); });
  }
}

}  // namespace topoep
