// The planner's bodies with one barrier left out. tools/mutants.py builds this under ThreadSanitizer and runs it once
// for each barrier of the sources.
//
//   mutant_plan FILE:LINE   leaves that barrier out. Fails where ThreadSanitizer or a wrong plan gives the mutant away,
//                           with status 3 where no problem comes to the barrier, and ends with 0 if the mutant survives
//   mutant_plan none        leaves nothing out
//   mutant_plan --list      the same, and prints every barrier that the problems come to, with the number of visits

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "tests/cc/mutant_team.h"
#include "tests/cc/random_instance.h"
#include "xla_ffi/plan/host_workspace.h"
#include "xla_ffi/plan/solver.cc"  // SolveOn(), and Solve() for the right answer

namespace topoep {
namespace {

constexpr int kWrongPlan = 1;
constexpr int kUsage = 2;
constexpr int kNeverReached = 3;
constexpr uint32_t kProblems = 400;
constexpr int32_t kLanes = 3;

constexpr std::byte kJunk{0x5a};

// As Solve() does it: one team for everything.
Answer SolveOnOneTeam(const Problem& problem) {
  const HostWorkspace workspace(problem, 1, 0);
  std::fill(workspace.begin(), workspace.end(), kJunk);
  Answer answer(problem);
  RunThreads<MutantTeam>(kLanes, [&](MutantTeam& team) { SolveOn(team, problem, workspace.Work(), answer.View()); });
  return answer;
}

// As a device does it: every entry on a team of its own, which keeps its plans.
Answer SolveInThreeSteps(const Problem& problem) {
  constexpr int32_t kMostRuns = 8;
  const HostWorkspace workspace(problem, kMostRuns);
  std::fill(workspace.begin(), workspace.end(), kJunk);
  const Workspace& work = workspace.Work();
  Answer answer(problem);
  RunThreads<MutantTeam>(kLanes, [&](MutantTeam& team) { Begin(team, work); });
  for (int32_t run = work.NumRuns() - 1; run >= 0; --run) {
    RunThreads<MutantTeam>(kLanes, [&](MutantTeam& team) { RunEntry(team, problem, work, work.MemoryOf(run), run); });
  }
  RunThreads<MutantTeam>(kLanes,
                         [&](MutantTeam& team) { Conclude(team, problem, work, work.MemoryOf(0), answer.View()); });
  return answer;
}

// One problem in four is for a planner that does not search; some have bad demand.
Problem MakeProblem(Instance& instance, uint32_t seed) {
  instance = RandomInstance(seed);
  if (seed % 16 == 5) instance.omega[0] = -1;
  Problem problem = instance.View(1);
  if (seed % 8 == 3) problem.planner = Planner::kTopoepPaper;
  if (seed % 8 == 7) problem.planner = Planner::kNone;
  return problem;
}

int Run(const std::string& site, bool list) {
  mutant_site = site;
  for (uint32_t seed = 0; seed < kProblems; ++seed) {
    Instance instance;
    const Problem problem = MakeProblem(instance, seed);
    Answer right(problem);
    Solve(problem, right.View());
    if (SolveOnOneTeam(problem) == right && SolveInThreeSteps(problem) == right) continue;
    std::printf("wrong plan of problem %" PRIu32 "\n", seed);
    return kWrongPlan;
  }
  if (list) {
    for (const auto& [name, visits] : site_visits) std::printf("%s %" PRId64 "\n", name.c_str(), visits);
  }
  return site.empty() || site_visits.count(site) > 0 ? 0 : kNeverReached;
}

}  // namespace
}  // namespace topoep

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: mutant_plan FILE:LINE | none | --list\n");
    return topoep::kUsage;
  }
  const std::string what = argv[1];
  const bool list = what == "--list";
  return topoep::Run(list || what == "none" ? "" : what, list);
}
