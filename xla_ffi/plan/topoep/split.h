// From the rows of instances to quotas; topoep_jax/plan/topoep/split.py is the same in NumPy.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_SPLIT_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_SPLIT_H_

#include <cstdint>

#include "xla_ffi/plan/topoep/apportion.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/fill.h"
#include "xla_ffi/plan/topoep/select.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// Quotas of the plan that Fill() left: rows go to their source's domain if it serves the expert, else to the main's;
// there an instance takes its own rank's rows first, then all sources alike. Three dependent steps, then no barrier.
template <class Team>
TOPOEP_STAGE void Split(Team& team, const Context& context, const Selection& selection, const FillMemory& fill,
                        const Jobs& jobs, const State& state) {
  const int32_t ranks = context.ranks;
  const int32_t* omega = context.problem->omega;
  const auto executes = [&](int32_t source, int32_t expert) {
    const int32_t domain = context.DomainOf(source);
    return selection.served[context.At(domain, expert)] ? domain : context.Home(expert);
  };
  // A job for each expert with several instances in a domain, at the first slot there that holds it.
  const auto starts_job = [&](int32_t slot) {
    const int32_t expert = state.slot_expert[slot];
    if (expert < 0) return false;
    const int32_t domain = context.DomainOf(slot / context.slots);
    bool several = context.Home(expert) == domain;
    for (int32_t g = 0; g < context.domains.Size(domain); ++g) {
      const int32_t rank = context.domains.Rank(domain, g);
      if (rank == slot / context.slots || state.InstanceOf(context, rank, expert) < context.mains) continue;
      if (rank < slot / context.slots) return false;
      several = true;
    }
    return several;
  };
  team.ForEach(ranks * ranks, [&](int32_t i) {
    int32_t* rows = state.Quota(context, i / ranks, i % ranks, 0);
    for (int32_t j = 0; j < context.instances; ++j) rows[j] = 0;
  });
  team.ScanEach(
      1, ranks * context.slots + 1,
      [&](int32_t, int32_t slot) { return int64_t{slot < ranks * context.slots && starts_job(slot)}; }, jobs.index);
  const int32_t num_jobs = static_cast<int32_t>(jobs.index[ranks * context.slots]);
  team.ForEach(ranks * context.slots, [&](int32_t slot) {
    if (jobs.index[slot + 1] == jobs.index[slot]) return;
    jobs.slot[jobs.index[slot]] = slot;
    jobs.parts[jobs.index[slot]] = context.domains.Size(context.DomainOf(slot / context.slots));
  });
  // Every row whose expert has one instance in the domain that executes it.
  team.ForEach(context.num_domains * context.experts, [&](int32_t i) {
    const int32_t domain = i / context.experts;
    const int32_t expert = i % context.experts;
    const bool is_home = context.Home(expert) == domain;
    if (!is_home && !selection.served[i]) return;
    int32_t count = 0;
    int32_t on = 0;
    int32_t instance = 0;
    for (int32_t g = 0; g < context.domains.Size(domain); ++g) {
      const int32_t rank = context.domains.Rank(domain, g);
      const int32_t j = state.InstanceOf(context, rank, expert);
      if (j < 0) continue;
      ++count;
      on = rank;
      instance = j;
    }
    if (count != 1) return;
    const int32_t sources = is_home ? ranks : context.domains.Size(domain);
    for (int32_t k = 0; k < sources; ++k) {
      const int32_t source = is_home ? k : context.domains.Rank(domain, k);
      if (executes(source, expert) != domain) continue;
      *state.Quota(context, source, on, instance) = omega[int64_t{source} * context.experts + expert];
    }
  });
  // The others: what an instance's own rank sends it stays there, the rest is apportioned.
  team.ForEach(ranks * context.slots * ranks, [&](int32_t i) {
    const int32_t slot = i / ranks;
    const int64_t job = jobs.index[slot];
    if (jobs.index[slot + 1] == job) return;
    const int32_t source = i % ranks;
    const int32_t expert = state.slot_expert[slot];
    const int32_t domain = context.DomainOf(slot / context.slots);
    int64_t rows = executes(source, expert) == domain ? omega[int64_t{source} * context.experts + expert] : 0;
    if (context.DomainOf(source) == domain) {
      const int32_t instance = state.InstanceOf(context, source, expert);
      int64_t target = 0;
      if (instance >= context.mains)
        target = fill.slot_target[int64_t{source} * context.slots + instance - context.mains];
      if (instance >= 0 && instance < context.mains) target = fill.main_target[expert];
      const int64_t kept = rows < target ? rows : target;
      if (kept > 0) *state.Quota(context, source, source, instance) = static_cast<int32_t>(kept);
      rows -= kept;
      jobs.part[job * jobs.width + context.domains.position[source]] = target - kept;
    }
    jobs.weight[job * ranks + source] = rows;
  });
  team.Sync();
  LayRests(team, context, num_jobs, jobs);
  Apportion(team, context, num_jobs, jobs, [&](int32_t job, int32_t source, int32_t taker, int32_t rows) {
    const int32_t slot = jobs.slot[job];
    const int32_t rank = context.domains.Rank(context.DomainOf(slot / context.slots), taker);
    const int32_t instance = state.InstanceOf(context, rank, state.slot_expert[slot]);
    team.Add(state.Quota(context, source, rank, instance), rows);
  });
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_SPLIT_H_
