// Busy ranks hand rows to ranks with room, one move after the other; topoep_jax/plan/topoep/greedy.py is the same in
// NumPy.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_GREEDY_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_GREEDY_H_

#include <cstdint>

#include "xla_ffi/plan/links.h"
#include "xla_ffi/plan/topoep/apportion.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/plan/topoep/spread.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// From the empty plan: the fullest rank above the level hands the most rows it can, less the price of a pull.
template <class Team>
TOPOEP_STAGE void Greedy(Team& team, const Context& context, const Candidate& candidate, const SpreadMemory& memory,
                         const Jobs& jobs, const State& state) {
  const int32_t ranks = context.ranks;
  const CostModel& cost = context.problem->cost;
  const int64_t level = context.Fair() * (1000 + candidate.spread) / 1000;
  const auto pull_rows = [&](int64_t fs_per_byte) {
    if (cost.row_ps == 0) return int64_t{0};
    return candidate.price * LinkPs(cost.expert_bytes, fs_per_byte) / (4 * cost.row_ps);
  };
  const int64_t intra = pull_rows(cost.intra_fs_per_byte);
  const int64_t inter = pull_rows(cost.inter_fs_per_byte);
  const auto amount = [&](int32_t from, int32_t expert, int32_t to) {
    const int64_t excess = memory.load[from] - context.Share(from, level);
    const int64_t room = context.Share(to, level) - memory.load[to];
    const int64_t rows = memory.rows[expert];
    return rows < excess ? (rows < room ? rows : room) : (excess < room ? excess : room);
  };
  team.ForEach(context.experts, [&](int32_t expert) { memory.rows[expert] = context.total[expert]; });
  team.ForEach(ranks, [&](int32_t r) {
    int64_t load = 0;
    for (int32_t a = 0; a < context.mains; ++a) load += context.total[r * context.mains + a];
    memory.load[r] = load;
    memory.blocked[r] = 0;
  });
  team.ForEach(ranks * context.slots, [&](int32_t i) { memory.moved[i] = 0; });
  team.Sync();
  while (true) {
    const Best from = team.ArgMax(ranks, [&](int32_t r) {
      const bool over = memory.load[r] > context.Share(r, level);
      return over && !memory.blocked[r] ? context.Level(r, memory.load[r]) : kNoKey;
    });
    if (!from.Found()) break;
    const Best best = team.ArgMax(context.mains * ranks, [&](int32_t i) {
      const int32_t expert = from.index * context.mains + i / ranks;
      const int32_t to = i % ranks;
      if (to == from.index || memory.rows[expert] == 0 || memory.load[to] >= context.Share(to, level)) return kNoKey;
      if (!context.MayHold(to, expert)) return kNoKey;
      const bool held = state.InstanceOf(context, to, expert) >= 0;
      if (!held && state.FreeSlots(context, to) == 0) return kNoKey;
      const int64_t price = held ? 0 : context.DomainOf(to) == context.DomainOf(from.index) ? intra : inter;
      return amount(from.index, expert, to) - price;
    });
    team.Single([&] {
      if (!best.Found()) {
        memory.blocked[from.index] = 1;
        return;
      }
      const int32_t expert = from.index * context.mains + best.index / ranks;
      const int32_t to = best.index % ranks;
      const int64_t rows = amount(from.index, expert, to);
      int32_t instance = state.InstanceOf(context, to, expert);
      for (int32_t n = 0; instance < 0; ++n) {
        int32_t& slot = state.slot_expert[int64_t{to} * context.slots + n];
        if (slot >= 0) continue;
        slot = expert;
        instance = context.mains + n;
      }
      memory.moved[int64_t{to} * context.slots + instance - context.mains] += rows;
      memory.rows[expert] -= rows;
      memory.load[from.index] -= rows;
      memory.load[to] += rows;
    });
    team.Sync();
  }
  // A job for each expert that moved: its sources share every part alike. Mains come first, one for each job.
  team.ScanEach(
      1, context.experts + 1,
      [&](int32_t, int32_t expert) {
        return int64_t{expert < context.experts && memory.rows[expert] < context.total[expert]};
      },
      jobs.index);
  const int32_t num_jobs = static_cast<int32_t>(jobs.index[context.experts]);
  team.ForEach(context.experts, [&](int32_t expert) {
    if (jobs.index[expert + 1] == jobs.index[expert]) return;
    const int64_t job = jobs.index[expert];
    jobs.slot[job] = expert;
    int32_t parts = 0;
    for (int32_t i = 0; i < ranks * context.slots; ++i) {
      if (state.slot_expert[i] != expert) continue;
      memory.taker[job * jobs.width + parts] = i;
      jobs.part[job * jobs.width + parts++] = memory.moved[i];
    }
    jobs.part[job * jobs.width + parts] = memory.rows[expert];
    jobs.parts[job] = parts + 1;
    for (int32_t s = 0; s < ranks; ++s) {
      jobs.weight[job * ranks + s] = context.problem->omega[int64_t{s} * context.experts + expert];
    }
  });
  team.Sync();
  LayRests(team, context, num_jobs, jobs);
  Apportion(team, context, num_jobs, jobs, [&](int32_t job, int32_t source, int32_t part, int32_t rows) {
    if (part + 1 == jobs.parts[job]) return;
    const int32_t taker = memory.taker[int64_t{job} * jobs.width + part];
    const int32_t expert = jobs.slot[job];
    team.Add(state.Quota(context, source, taker / context.slots, context.mains + taker % context.slots), rows);
    team.Add(state.Quota(context, source, expert / context.mains, expert % context.mains), -rows);
  });
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_GREEDY_H_
