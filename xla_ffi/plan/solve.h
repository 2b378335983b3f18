// One planning problem from demand to plan, in three bodies for any team: Begin() on one team, RunEntry() for each
// entry on any number of teams side by side, Conclude() on one team. The host runs all three on one team, a device as
// three kernels with a block for each entry.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/paper.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/topoep/candidate.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/plan/topoep/refine.h"
#include "xla_ffi/plan/topoep/search.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

inline constexpr int64_t kKeepBytes = int64_t{64} << 20;

// Where everything lies. It is made on the host, for memory of the host or of a device, and holds no pointer into
// itself, so that it can be copied there; then `context.problem` and `context.domains` must be set to what the device
// sees.
struct Workspace {
  // `teams` entries run side by side; every plan is kept if that takes at most `keep_bytes`. Reads the problem's
  // tables.
  Workspace(const Problem& problem, const Domains& domains, int32_t teams, Arena& arena,
            int64_t keep_bytes = kKeepBytes)
      : context(problem, domains, arena), entries(context, NumCandidates(), keep_bytes, arena), paper(context, arena) {
    Arena measure;
    const Memory unused(context, measure);
    memory_bytes = measure.Used();
    memories = arena.Take<char>(teams * memory_bytes);
  }

  // Every planner scores the empty plan.
  TOPOEP_BODY int32_t NumCandidates() const {
    return context.problem->planner == Planner::kTopoep ? context.problem->effort.num_candidates : 1;
  }
  TOPOEP_BODY bool RunsPaper() const {
    return context.problem->planner == Planner::kTopoepPaper ||
           (context.problem->planner == Planner::kTopoep && context.problem->effort.paper);
  }
  // Entries that RunEntry() takes.
  TOPOEP_BODY int32_t NumRuns() const { return NumCandidates() + (RunsPaper() ? 1 : 0); }
  // Valid after Begin().
  TOPOEP_BODY bool Refuses() const { return context.sums[2] != 0 || context.sums[0] > kMaxRows; }
  TOPOEP_BODY Memory MemoryOf(int32_t team) const {
    Arena arena(memories + team * memory_bytes);
    return Memory(context, arena);
  }

  Context context;
  Entries entries;
  PaperMemory paper;
  int64_t memory_bytes;
  char* memories;  // [teams, memory_bytes]
};

// Checks the demand, and prepares what all entries read; it is there after the next barrier.
template <class Team>
TOPOEP_BODY void Begin(Team& team, const Workspace& work) {
  Prepare(team, work.context);
}

// The paper's plan in the state. Ties in what follows go by slot.
template <class Team>
TOPOEP_STAGE void MakePaperPlan(Team& team, const Workspace& work, const Memory& memory) {
  PaperPlan(team, work.context, work.paper, memory.spare_state);
  SortSlots(team, *work.context.problem, memory.spare_state.slot_expert, memory.spare_state.quota,
            memory.state.slot_expert, memory.state.quota);
}

// Makes and scores the plans of entry `run`, 0..NumRuns()-1. Begin() must have ended on every team.
template <class Team>
TOPOEP_BODY void RunEntry(Team& team, const Problem& problem, const Workspace& work, const Memory& memory,
                          int32_t run) {
  if (work.Refuses()) return;
  const bool paper = run == work.NumCandidates();
  if (!paper && problem.planner == Planner::kTopoep) {
    const int32_t first = run * kPhases;
    team.Single([&] { work.entries.entry[first + kPhases - 1].exists = 0; });
    RunCandidate(team, work.context, problem.effort, run, kPhases - 1, memory,
                 [&](Improver<Team>& improver, int32_t phase) {
                   Record(team, work.context, improver, memory.state, work.entries, first + phase);
                 });
    return;
  }
  if (paper) {
    MakePaperPlan(team, work, memory);
  } else {
    SetEmpty(team, work.context, memory.state);
  }
  Improver<Team> improver(team, work.context, memory.improve, memory.state);
  improver.Start();
  Record(team, work.context, improver, memory.state, work.entries, paper ? work.entries.Paper() : 0);
}

// Where the plan of entry `at` lies: kept, or made again in `memory`. Ends with a barrier.
template <class Team>
TOPOEP_BODY State Restore(Team& team, const Workspace& work, const Memory& memory, int32_t at) {
  if (work.entries.Keeps()) return work.entries.Kept(work.context, at);
  if (at == work.entries.Paper()) {
    MakePaperPlan(team, work, memory);
  } else if (work.context.problem->planner == Planner::kTopoep) {
    RunCandidate(team, work.context, work.context.problem->effort, at / kPhases, at % kPhases, memory,
                 [](Improver<Team>&, int32_t) {});
  } else {
    SetEmpty(team, work.context, memory.state);
  }
  team.Sync();
  return memory.state;
}

// Chooses among the entries and writes the plan. RunEntry() must have ended for every entry.
template <class Team>
TOPOEP_BODY void Conclude(Team& team, const Problem& problem, const Workspace& work, const Memory& memory,
                          const Plan& plan) {
  if (work.Refuses()) {
    Refuse(team, problem, plan);
    return;
  }
  const Entries& entries = work.entries;
  team.ForEach(problem.num_ranks, [&](int32_t rank) { plan.rank_load[rank] = 0; });
  team.Single([&] {
    if (!work.RunsPaper()) entries.entry[entries.Paper()].exists = 0;
    if (problem.planner == Planner::kNone) *entries.choice = 0;
    if (problem.planner == Planner::kTopoepPaper) *entries.choice = entries.Paper();
    if (problem.planner == Planner::kTopoep) *entries.choice = Choose(problem, entries);
  });
  team.Sync();
  const int32_t choice = *entries.choice;
  Worth worth = entries.entry[choice].worth;
  State state = memory.state;
  if (problem.planner == Planner::kTopoep && CanRefine(work.context, problem.effort)) {
    worth = RefineBest(team, work.context, problem.effort, memory, entries, choice, [&](int32_t entry) {
      const State kept = Restore(team, work, memory, entry);
      if (kept.quota != memory.state.quota) CopyState(team, work.context, kept, memory.state);
    });
  } else {
    state = Restore(team, work, memory, choice);
  }
  Finish(team, problem, state.slot_expert, state.quota, worth, entries.entry[0].worth, plan);
}

}  // namespace topoep
