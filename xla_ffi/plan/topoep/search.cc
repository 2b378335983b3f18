#include "xla_ffi/plan/topoep/search.h"

#include <algorithm>
#include <cstdint>

#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/paper.h"
#include "xla_ffi/plan/topoep/candidate.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/refine.h"
#include "xla_ffi/team/thread_team.h"

namespace topoep {
namespace {

template <class Team>
void CopyToState(Team& team, const Context& context, const Plan& plan, const State& state) {
  team.Single([&] {
    std::copy_n(plan.slot_expert, int64_t{context.ranks} * context.slots, state.slot_expert);
    std::copy_n(plan.quota, context.problem->NumQuotas(), state.quota);
  });
  team.Sync();
  FreeIdleSlots(team, context, state);
}

// `plan` holds the paper's plan on entry if the effort asks for it.
template <class Team>
void Search(Team& team, const Context& context, const Effort& effort, const Memory& memory, const Plan& plan) {
  const int32_t paper = effort.num_candidates * kPhases;
  const int32_t num_entries = paper + 1;
  Prepare(team, context);
  for (int32_t i = 0; i < effort.num_candidates; ++i) {
    RunCandidate(team, context, effort, i, kPhases - 1, true, memory);
    team.Sync();
  }
  team.Single([&] { memory.entries[paper].exists = 0; });
  if (effort.paper) {
    CopyToState(team, context, plan, memory.state);
    Improver<Team> improver(team, context, memory.improve, memory.state);
    improver.Start();
    Record(team, improver, memory, paper);
  }
  team.Sync();
  team.Single([&] { *memory.choice = Choose(*context.problem, memory.entries, num_entries, paper); });
  team.Sync();
  const auto restore = [&](int32_t entry) {
    if (entry == paper) {
      CopyToState(team, context, plan, memory.state);
    } else {
      RunCandidate(team, context, effort, entry / kPhases, entry % kPhases, false, memory);
    }
    team.Sync();
  };
  restore(*memory.choice);
  if (CanRefine(context, effort)) {
    const auto refine = [&] { return Refine(team, context, effort, memory.improve, memory.spare_state, memory.state); };
    Score best = refine();
    int64_t last = -1;
    for (int32_t start = 0; best.fits && start < effort.refine_starts; ++start) {
      const int32_t entry = NextCheapest(*context.problem, memory.entries, num_entries, last);
      if (entry < 0) break;
      last = memory.entries[entry].cost;
      CopyState(team, context, memory.state, memory.best_state);
      restore(entry);
      const Score score = refine();
      if (score.fits && score.cost < best.cost) {
        best = score;
      } else {
        CopyState(team, context, memory.best_state, memory.state);
      }
    }
  }
  team.Single([&] {
    std::copy_n(memory.state.slot_expert, int64_t{context.ranks} * context.slots, plan.slot_expert);
    std::copy_n(memory.state.quota, context.problem->NumQuotas(), plan.quota);
  });
}

}  // namespace

void TopoepPlan(const Problem& problem, const Effort& effort, int32_t threads, const Plan& plan) {
  Arena arena;
  const DomainTable domains(problem);
  const Context context(problem, domains.View(), arena);
  const Memory memory(context, effort.num_candidates * kPhases + 1, arena);
  if (effort.paper) {
    PaperPlan(problem, plan);
    SortSlots(problem, plan);  // ties in what follows go by slot
  }
  if (threads == 1) {
    SerialTeam team;
    Search(team, context, effort, memory, plan);
  } else {
    RunThreads(threads, [&](ThreadTeam& team) { Search(team, context, effort, memory, plan); });
  }
}

}  // namespace topoep
