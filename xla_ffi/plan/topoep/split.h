// Whole rows of several sources over several instances, both sums given; and the quotas of a filled plan.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_SPLIT_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_SPLIT_H_

#include <cstdint>

#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/fill.h"
#include "xla_ffi/plan/topoep/select.h"

namespace topoep {

// Jobs of Apportion(): weight [jobs, R] rows of each source, part [jobs, width] rows of each taker; equal sums.
struct Jobs {
  Jobs(const Context& context, Arena& arena)
      : most(context.ranks * context.slots),
        width(context.ranks + 1),
        slot(arena.Take<int32_t>(most)),
        parts(arena.Take<int32_t>(most)),
        index(arena.Take<int64_t>(int64_t{context.ranks} * context.instances + 1)),
        weight(arena.Take<int64_t>(int64_t{most} * context.ranks)),
        part(arena.Take<int64_t>(int64_t{most} * width)),
        left_weight(arena.Take<int64_t>(int64_t{most} * context.ranks)),
        left_part(arena.Take<int64_t>(int64_t{most} * width)),
        weight_start(arena.Take<int64_t>(int64_t{most} * context.ranks)),
        part_start(arena.Take<int64_t>(int64_t{most} * width)) {}

  int32_t most;
  int32_t width;
  int32_t* slot;         // [most] what a job is about
  int32_t* parts;        // [most] takers of each job
  int64_t* index;        // of a job among those that exist
  int64_t* weight;       // [most, R]
  int64_t* part;         // [most, width]
  int64_t* left_weight;  // after the proportional whole rows
  int64_t* left_part;
  int64_t* weight_start;  // where they start when laid end to end
  int64_t* part_start;
};

// put(job, source, taker, rows): the proportional share rounded down, plus what the rests, laid end to end, share.
template <class Team, class Put>
TOPOEP_BODY void Apportion(Team& team, const Context& context, int32_t num_jobs, const Jobs& jobs, Put put) {
  const int32_t sources = context.ranks;
  const auto sum = [&](int32_t job) {
    int64_t rows = 0;
    for (int32_t n = 0; n < jobs.parts[job]; ++n) rows += jobs.part[int64_t{job} * jobs.width + n];
    return rows;
  };
  team.ForEach(num_jobs * sources, [&](int32_t i) {
    const int32_t job = i / sources;
    const int64_t rows = sum(job);
    int64_t left = jobs.weight[i];
    for (int32_t n = 0; rows > 0 && n < jobs.parts[job]; ++n) {
      left -= jobs.weight[i] * jobs.part[int64_t{job} * jobs.width + n] / rows;
    }
    jobs.left_weight[i] = left;
  });
  team.ForEach(num_jobs * jobs.width, [&](int32_t i) {
    const int32_t job = i / jobs.width;
    if (i % jobs.width >= jobs.parts[job]) return;
    const int64_t rows = sum(job);
    int64_t left = jobs.part[i];
    for (int32_t s = 0; rows > 0 && s < sources; ++s)
      left -= jobs.weight[int64_t{job} * sources + s] * jobs.part[i] / rows;
    jobs.left_part[i] = left;
  });
  team.Sync();
  team.ScanEach(
      num_jobs, sources, [&](int32_t job, int32_t s) { return jobs.left_weight[int64_t{job} * sources + s]; },
      jobs.weight_start);
  team.ScanEach(
      num_jobs, jobs.width,
      [&](int32_t job, int32_t n) { return n < jobs.parts[job] ? jobs.left_part[int64_t{job} * jobs.width + n] : 0; },
      jobs.part_start);
  team.ForEach(num_jobs * sources, [&](int32_t i) {
    const int32_t job = i / sources;
    const int64_t total = sum(job);
    if (total == 0 || jobs.weight[i] == 0) return;
    const int64_t start = jobs.weight_start[i];
    const int64_t end = start + jobs.left_weight[i];
    for (int32_t n = 0; n < jobs.parts[job]; ++n) {
      const int64_t taker = int64_t{job} * jobs.width + n;
      const int64_t low = jobs.part_start[taker] > start ? jobs.part_start[taker] : start;
      const int64_t taker_end = jobs.part_start[taker] + jobs.left_part[taker];
      const int64_t high = taker_end < end ? taker_end : end;
      const int64_t rows = jobs.weight[i] * jobs.part[taker] / total + (high > low ? high - low : 0);
      if (rows > 0) put(job, i % sources, n, static_cast<int32_t>(rows));
    }
  });
  team.Sync();
}

// Quotas of the plan that Fill() left: rows go to their source's domain if it serves the expert, else to the main's;
// there an instance takes its own rank's rows first, then all sources alike.
template <class Team>
TOPOEP_BODY void Split(Team& team, const Context& context, const Selection& selection, const FillMemory& fill,
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
  team.ForEach(ranks * context.experts, [&](int32_t i) {
    const int32_t source = i / context.experts;
    const int32_t expert = i % context.experts;
    if (omega[i] == 0) return;
    const int32_t domain = executes(source, expert);
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
    if (count == 1) *state.Quota(context, source, on, instance) = omega[i];
  });
  team.Sync();
  team.ForEach(num_jobs * ranks, [&](int32_t i) {
    const int32_t slot = jobs.slot[i / ranks];
    const int32_t source = i % ranks;
    const int32_t expert = state.slot_expert[slot];
    const int32_t domain = context.DomainOf(slot / context.slots);
    const int64_t own = int64_t{source} * context.experts + expert;
    int64_t rows = executes(source, expert) == domain ? omega[own] : 0;
    if (context.DomainOf(source) == domain) {
      const int32_t instance = state.InstanceOf(context, source, expert);
      int64_t target = 0;
      if (instance >= context.mains)
        target = fill.slot_target[int64_t{source} * context.slots + instance - context.mains];
      if (instance >= 0 && instance < context.mains) target = fill.main_target[expert];
      const int64_t kept = rows < target ? rows : target;
      if (kept > 0) *state.Quota(context, source, source, instance) = static_cast<int32_t>(kept);
      rows -= kept;
      jobs.part[int64_t{i / ranks} * jobs.width + context.domains.position[source]] = target - kept;
    }
    jobs.weight[i] = rows;
  });
  team.Sync();
  Apportion(team, context, num_jobs, jobs, [&](int32_t job, int32_t source, int32_t taker, int32_t rows) {
    const int32_t slot = jobs.slot[job];
    const int32_t rank = context.domains.Rank(context.DomainOf(slot / context.slots), taker);
    const int32_t instance = state.InstanceOf(context, rank, state.slot_expert[slot]);
    team.Add(state.Quota(context, source, rank, instance), rows);
  });
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_SPLIT_H_
