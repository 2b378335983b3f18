// From the rows of instances to quotas; topoep_jax/plan/topoep/split.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/apportion.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/fill.h"
#include "xla_ffi/plan/topoep/select.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// Rows of a source for an expert, if they are executed in the domain: the source's own, where that serves the expert,
// else the main's.
TOPOEP_BODY inline int32_t RowsExecutedIn(const Context& context, const Selection& selection, int32_t domain,
                                          int32_t source, int32_t expert) {
  const int32_t own = context.DomainOf(source);
  const int32_t executes = selection.served[context.At(own, expert)] ? own : context.Home(expert);
  return executes == domain ? context.Omega(source, expert) : 0;
}

// Whether a slot is the first of its domain with an expert that has several instances there.
TOPOEP_BODY inline bool StartsJob(const Context& context, const State& state, int32_t slot) {
  const int32_t expert = state.slot_expert[slot];
  if (expert < 0) return false;
  const int32_t own = slot / context.slots;
  const int32_t domain = context.DomainOf(own);
  bool several = context.Home(expert) == domain;
  for (int32_t g = 0; g < context.domains.Size(domain); ++g) {
    const int32_t rank = context.domains.Rank(domain, g);
    if (rank == own || state.InstanceOf(context, rank, expert) < context.mains) continue;
    if (rank < own) return false;
    several = true;
  }
  return several;
}

// All rows of an expert that its only instance in a domain executes, if it has but one there.
TOPOEP_BODY inline void GiveToOnly(const Context& context, const Selection& selection, const State& state,
                                   int32_t domain, int32_t expert) {
  const bool is_home = context.Home(expert) == domain;
  if (!is_home && !selection.served[context.At(domain, expert)]) return;
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
  for (int32_t k = 0; k < (is_home ? context.ranks : context.domains.Size(domain)); ++k) {
    const int32_t source = is_home ? k : context.domains.Rank(domain, k);
    const int32_t rows = RowsExecutedIn(context, selection, domain, source, expert);
    if (rows > 0) *state.Quota(context, source, on, instance) = rows;
  }
}

// Of a slot's job: what a source's own instance takes of its rows, and what is left to apportion on both sides.
TOPOEP_BODY inline void GiveToOwn(const Context& context, const Selection& selection, const FillMemory& fill,
                                  const Jobs& jobs, const State& state, int32_t slot, int32_t source) {
  const int64_t job = jobs.index[slot];
  const int32_t expert = state.slot_expert[slot];
  const int32_t domain = context.DomainOf(slot / context.slots);
  int64_t rows = RowsExecutedIn(context, selection, domain, source, expert);
  if (context.DomainOf(source) == domain) {
    const int32_t instance = state.InstanceOf(context, source, expert);
    int64_t target = 0;
    if (instance >= context.mains) target = fill.slot_target[source * context.slots + instance - context.mains];
    if (instance >= 0 && instance < context.mains) target = fill.main_target[expert];
    const int64_t kept = Min(rows, target);
    if (kept > 0) *state.Quota(context, source, source, instance) = static_cast<int32_t>(kept);
    rows -= kept;
    jobs.part[job * jobs.width + context.domains.position[source]] = target - kept;
  }
  jobs.weight[job * context.ranks + source] = rows;
}

// Quotas of the plan that Fill() left: an instance takes its own rank's rows first, then all sources alike. Three
// dependent steps, then no barrier.
template <class Team>
TOPOEP_STAGE void Split(Team& team, const Context& context, const Selection& selection, const FillMemory& fill,
                        const Jobs& jobs, const State& state) {
  const int32_t ranks = context.ranks;
  const int32_t slots = ranks * context.slots;
  team.ForEach(ranks * ranks, [&](int32_t i) {
    int32_t* rows = state.Quota(context, i / ranks, i % ranks, 0);
    for (int32_t j = 0; j < context.instances; ++j) rows[j] = 0;
  });
  team.ScanEach(
      1, slots + 1, [&](int32_t, int32_t slot) { return int64_t{slot < slots && StartsJob(context, state, slot)}; },
      jobs.index);
  const int32_t num_jobs = static_cast<int32_t>(jobs.index[slots]);
  team.ForEach(slots, [&](int32_t slot) {
    if (jobs.index[slot + 1] == jobs.index[slot]) return;
    jobs.slot[jobs.index[slot]] = slot;
    jobs.parts[jobs.index[slot]] = context.domains.Size(context.DomainOf(slot / context.slots));
  });
  team.ForEach(slots * ranks, [&](int32_t i) {
    const int32_t slot = i / ranks;
    if (jobs.index[slot + 1] > jobs.index[slot]) {
      GiveToOwn(context, selection, fill, jobs, state, slot, i % ranks);
    }
  });
  team.ForEach(context.num_domains * context.experts,
               [&](int32_t i) { GiveToOnly(context, selection, state, i / context.experts, i % context.experts); });
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
