// Busy ranks hand rows to ranks with room, one move after the other; topoep_jax/plan/topoep/greedy.py is the same in
// NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/links.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/apportion.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/plan/topoep/spread.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// Rows that take as long as the candidate's price of a pull.
TOPOEP_BODY inline int64_t PullRows(const CostModel& cost, int64_t price, int64_t fs_per_byte) {
  return cost.row_ps == 0 ? 0 : price * LinkPs(cost.expert_bytes, fs_per_byte) / (kQuarters * cost.row_ps);
}

// The fullest rank above the level hands the most rows it can, less the price of a pull, again and again. Counts the
// rows that leave each main in memory.rows, and those of each new replica in memory.moved.
template <class Team>
TOPOEP_BODY void MoveGreedily(Team& team, const Context& context, const Candidate& candidate,
                              const SpreadMemory& memory, const State& state) {
  const int32_t ranks = context.ranks;
  const CostModel& cost = context.problem->cost;
  const int64_t level = context.Fair() * (kPermille + candidate.spread) / kPermille;
  const int64_t intra = PullRows(cost, candidate.price, cost.intra_fs_per_byte);
  const int64_t inter = PullRows(cost, candidate.price, cost.inter_fs_per_byte);
  const auto over = [&](int32_t rank) { return memory.load[rank] - context.Share(rank, level); };
  const auto amount = [&](int32_t from, int32_t expert, int32_t to) {
    return Min(memory.rows[expert], Min(over(from), -over(to)));
  };
  while (true) {
    const Best from = team.ArgMax(ranks, [&](int32_t r) {
      return over(r) > 0 && !memory.blocked[r] ? context.Level(r, memory.load[r]) : kNoKey;
    });
    if (!from.Found()) return;
    const Best best = team.ArgMax(context.mains * ranks, [&](int32_t i) {
      const int32_t expert = from.index * context.mains + i / ranks;
      const int32_t to = i % ranks;
      if (to == from.index || memory.rows[expert] == 0 || over(to) >= 0) return kNoKey;
      if (!context.MayHold(to, expert)) return kNoKey;
      const int64_t rows = amount(from.index, expert, to);
      if (state.InstanceOf(context, to, expert) >= 0) return rows;
      if (state.FreeSlots(context, to) == 0) return kNoKey;
      return rows - (context.DomainOf(to) == context.DomainOf(from.index) ? intra : inter);
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
        int32_t& slot = state.slot_expert[to * context.slots + n];
        if (slot >= 0) continue;
        slot = expert;
        instance = context.mains + n;
      }
      memory.moved[to * context.slots + instance - context.mains] += rows;
      memory.rows[expert] -= rows;
      memory.load[from.index] -= rows;
      memory.load[to] += rows;
    });
    team.Sync();
  }
}

// From the empty plan.
template <class Team>
TOPOEP_STAGE void Greedy(Team& team, const Context& context, const Candidate& candidate, const SpreadMemory& memory,
                         const Jobs& jobs, const State& state) {
  team.ForEach(context.experts, [&](int32_t expert) { memory.rows[expert] = context.total[expert]; });
  team.ForEach(context.ranks, [&](int32_t r) {
    memory.load[r] = Sum(context.mains, [&](int32_t a) { return context.total[r * context.mains + a]; });
    memory.blocked[r] = 0;
  });
  team.ForEach(context.ranks * context.slots, [&](int32_t i) { memory.moved[i] = 0; });
  team.Sync();
  MoveGreedily(team, context, candidate, memory, state);
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
    int64_t* part = jobs.part + job * jobs.width;
    int32_t parts = 0;
    for (int32_t i = 0; i < context.ranks * context.slots; ++i) {
      if (state.slot_expert[i] != expert) continue;
      memory.taker[job * jobs.width + parts] = i;
      part[parts++] = memory.moved[i];
    }
    part[parts] = memory.rows[expert];
    jobs.slot[job] = expert;
    jobs.parts[job] = parts + 1;
    for (int32_t s = 0; s < context.ranks; ++s) jobs.weight[job * context.ranks + s] = context.Omega(s, expert);
  });
  team.Sync();
  LayRests(team, context, num_jobs, jobs);
  HandOut(team, context, num_jobs, memory, jobs, state, [&](int32_t expert) { return context.MainItem(expert); });
}

}  // namespace topoep
