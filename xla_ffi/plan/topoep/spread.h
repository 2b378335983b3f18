// Busy ranks spill over to ranks with room, by intervals; topoep_jax/plan/topoep/spread.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/apportion.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

struct SpreadMemory {
  TOPOEP_BODY SpreadMemory(const Context& context, Arena& arena) {
    const int64_t slots = int64_t{context.ranks} * context.slots;
    arena.Take(int64_t{context.ranks} * context.instances, &rows, &spill, &takers);
    arena.Take(context.ranks, &load, &excess, &spare, &start, &order, &receiver, &blocked);
    arena.Take(slots, &accepted, &amount, &slot_of, &moved);
    arena.Take(slots * (context.ranks + 1), &taker);
  }

  int64_t* rows;      // [R, J]
  int64_t* spill;     // [R, J] rows above the level, of the fullest instances
  int32_t* takers;    // [R, J] ranks that accepted rows of the instance
  int64_t* load;      // [R]
  int64_t* excess;    // [R] sum of spill
  int64_t* spare;     // [R] rows below the level, of ranks with a free slot
  int64_t* start;     // [R] of a rank's excess or spare when all are laid end to end, largest first
  int32_t* order;     // [R] its position there
  int32_t* receiver;  // [R] ranks with spare rows by position, those of each domain behind its begin if it is a scope
  int32_t* blocked;   // [R] greedy: nothing of the rank can move
  int32_t* accepted;  // [R, N] items (r * J + j) that a rank takes rows of, most rows first; -1: none
  int64_t* amount;    // [R, N]
  int32_t* slot_of;   // [R, N] slot that the accepted offer gets
  int64_t* moved;     // [R, N] greedy: rows of each new replica
  int32_t* taker;     // [jobs, R + 1] slot (r * N + n) of each part of a job
};

// Frees the slots without rows; each lane those of its ranks. No barrier.
template <class Team>
TOPOEP_BODY void DropIdle(Team& team, const Context& context, const SpreadMemory& memory, const State& state) {
  team.ForEach(context.ranks, [&](int32_t r) {
    for (int32_t n = 0; n < context.slots; ++n) {
      if (memory.rows[r * context.instances + context.mains + n] <= 0) state.slot_expert[r * context.slots + n] = -1;
    }
  });
}

// Hands the parts of the jobs, whose rests are laid, to their takers; all but the last, which stays with the instance
// that giver(job) names. No barrier.
template <class Team, class Giver>
TOPOEP_BODY void HandOut(Team& team, const Context& context, int32_t num_jobs, const SpreadMemory& memory,
                         const Jobs& jobs, const State& state, Giver giver) {
  Apportion(team, context, num_jobs, jobs, [&](int32_t job, int32_t source, int32_t part, int32_t rows) {
    if (part + 1 == jobs.parts[job]) return;
    const int32_t to = memory.taker[int64_t{job} * jobs.width + part];
    const int32_t from = giver(jobs.slot[job]);
    team.Add(state.Quota(context, source, to / context.slots, context.mains + to % context.slots), rows);
    team.Add(state.Quota(context, source, from / context.instances, from % context.instances), -rows);
  });
}

// A pass of spilling by intervals, over all ranks or inside each domain. An item is an instance, r * J + j.
template <class Team>
class SpreadPass {
 public:
  TOPOEP_BODY SpreadPass(Team& team, const Context& context, const SpreadMemory& memory, const Jobs& jobs,
                         const State& state, int64_t level, bool intra)
      : team_(team), context_(context), memory_(memory), jobs_(jobs), state_(state), level_(level), intra_(intra) {}

  // Five dependent steps; leaves jobs, and says how many. The rows of `old_jobs`, which the pass before left, are moved
  // meanwhile.
  TOPOEP_STAGE int32_t Run(int32_t old_jobs) {
    const int32_t items = context_.ranks * context_.instances;
    team_.ForEach(context_.ranks, [&](int32_t r) { FindSpill(r); });
    LayRests(team_, context_, old_jobs, jobs_);
    team_.ForEach(context_.ranks, [&](int32_t r) { LayEndToEnd(r); });
    HandOut(team_, context_, old_jobs, memory_, jobs_, state_, [](int32_t item) { return item; });
    team_.Sync();
    team_.ForEach(context_.ranks, [&](int32_t t) {
      if (memory_.excess[t] == 0 && memory_.spare[t] > 0) Accept(t);
      AssignSlots(t);
    });
    team_.Sync();
    team_.ScanEach(
        1, items + 1, [&](int32_t, int32_t item) { return int64_t{item < items && memory_.takers[item] > 0}; },
        jobs_.index);
    team_.ForEach(items, [&](int32_t item) {
      if (jobs_.index[item + 1] > jobs_.index[item]) MakeJob(item, static_cast<int32_t>(jobs_.index[item]));
    });
    team_.ForEach(context_.ranks, [&](int32_t t) {
      ForOffers(t, [&](int32_t offer) {
        state_.slot_expert[t * context_.slots + memory_.slot_of[offer]] = ExpertOf(memory_.accepted[offer]);
      });
    });
    team_.Sync();
    return static_cast<int32_t>(jobs_.index[items]);
  }

 private:
  TOPOEP_BODY bool Together(int32_t a, int32_t b) const {
    return !intra_ || context_.DomainOf(a) == context_.DomainOf(b);
  }
  // Where the receivers of the rank's scope begin.
  TOPOEP_BODY int32_t First(int32_t rank) const { return intra_ ? context_.domains.begin[context_.DomainOf(rank)] : 0; }
  TOPOEP_BODY int32_t ExpertOf(int32_t item) const {
    return state_.ExpertOf(context_, item / context_.instances, item % context_.instances);
  }
  template <class F>
  TOPOEP_BODY void ForOffers(int32_t taker, F f) const {
    for (int32_t n = 0; n < context_.slots && memory_.accepted[taker * context_.slots + n] >= 0; ++n) {
      f(taker * context_.slots + n);
    }
  }

  // What a rank has above the level, and what it has room for. Small instances stay whole; the fullest spill.
  TOPOEP_BODY void FindSpill(int32_t r) const {
    const int32_t instances = context_.instances;
    const int64_t* rows = memory_.rows + r * instances;
    const int64_t limit = context_.Share(r, level_);
    const int64_t load = Sum(instances, [&](int32_t j) { return rows[j]; });
    int64_t excess = 0;
    for (int32_t j = 0; j < instances; ++j) {
      const int64_t below =
          Sum(instances, [&](int32_t k) { return IsLess(rows[k], rows[j], k, j) ? rows[k] : int64_t{0}; });
      const int64_t spill = Max(below + rows[j] - limit, 0) - Max(below - limit, 0);
      memory_.spill[r * instances + j] = spill;
      memory_.takers[r * instances + j] = 0;
      excess += spill;
    }
    memory_.excess[r] = excess;
    memory_.spare[r] = load < limit && state_.FreeSlots(context_, r) > 0 ? limit - load : 0;
    memory_.receiver[r] = -1;
    for (int32_t n = 0; n < context_.slots; ++n) memory_.accepted[r * context_.slots + n] = -1;
  }

  // Where a giver's excess, or a receiver's spare rows, start among those of its scope.
  TOPOEP_BODY void LayEndToEnd(int32_t r) const {
    const bool gives = memory_.excess[r] > 0;
    const int64_t* sizes = gives ? memory_.excess : memory_.spare;
    int64_t start = 0;
    int32_t order = 0;
    for (int32_t o = 0; o < context_.ranks; ++o) {
      if (!Together(r, o) || (memory_.excess[o] > 0) != gives || !IsLess(sizes[r], sizes[o], o, r)) continue;
      start += sizes[o];
      ++order;
    }
    memory_.start[r] = start;
    memory_.order[r] = order;
    if (!gives && memory_.spare[r] > 0) memory_.receiver[First(r) + order] = r;
  }

  // Givers as laid, then larger spills, then lower instances.
  TOPOEP_BODY bool ComesFirst(int32_t a, int32_t b) const {
    const int32_t giver = a / context_.instances;
    const int32_t other = b / context_.instances;
    if (giver != other) return memory_.order[giver] < memory_.order[other];
    return IsLess(memory_.spill[b], memory_.spill[a], a, b);
  }

  // Rank t takes what falls into its interval, as far as it may and has slots.
  TOPOEP_BODY void Accept(int32_t t) const {
    const int64_t low = memory_.start[t];
    const int64_t high = low + memory_.spare[t];
    const int32_t free = state_.FreeSlots(context_, t);
    for (int32_t r = 0; r < context_.ranks; ++r) {
      if (memory_.excess[r] == 0 || !Together(r, t)) continue;
      if (memory_.start[r] >= high || memory_.start[r] + memory_.excess[r] <= low) continue;
      const int32_t first = r * context_.instances;
      for (int32_t item = first; item < first + context_.instances; ++item) {
        if (memory_.spill[item] == 0) continue;
        const int64_t start = memory_.start[r] + Sum(context_.instances, [&](int32_t k) {
                                return ComesFirst(first + k, item) ? memory_.spill[first + k] : int64_t{0};
                              });
        const int64_t rows = Min(start + memory_.spill[item], high) - Max(start, low);
        const int32_t expert = ExpertOf(item);
        if (rows <= 0 || !context_.MayHold(t, expert) || state_.InstanceOf(context_, t, expert) >= 0) continue;
        Insert(t, free, item, rows);
      }
    }
  }

  // Into the offers that rank t accepts, by rows, then as givers come; of one expert only the first offer counts.
  TOPOEP_BODY void Insert(int32_t t, int32_t free, int32_t item, int64_t rows) const {
    int32_t* accepted = memory_.accepted + t * context_.slots;
    int64_t* amounts = memory_.amount + t * context_.slots;
    for (int32_t n = 0; n < free; ++n) {
      const int32_t old = accepted[n];
      const int64_t old_rows = amounts[n];
      const bool wins = old < 0 || rows > old_rows || (rows == old_rows && ComesFirst(item, old));
      const bool same = old >= 0 && ExpertOf(old) == ExpertOf(item);
      if (wins) {
        accepted[n] = item;
        amounts[n] = rows;
        item = old;
        rows = old_rows;
      }
      if (same || old < 0) return;
    }
  }

  // Offers that stand get the free slots in turn.
  TOPOEP_BODY void AssignSlots(int32_t t) const {
    int32_t slot = 0;
    ForOffers(t, [&](int32_t offer) {
      while (state_.slot_expert[t * context_.slots + slot] >= 0) ++slot;
      memory_.slot_of[offer] = slot++;
      team_.Add(&memory_.takers[memory_.accepted[offer]], 1);
    });
  }

  // A job for an item that gives: a part for each taker, in the order in which receivers were laid, and what stays.
  TOPOEP_BODY void MakeJob(int32_t item, int32_t job) const {
    const int32_t giver = item / context_.instances;
    const int32_t receivers = intra_ ? context_.domains.Size(context_.DomainOf(giver)) : context_.ranks;
    int64_t* part = jobs_.part + int64_t{job} * jobs_.width;
    int64_t stays = memory_.rows[item];
    int32_t parts = 0;
    for (int32_t position = 0; position < receivers; ++position) {
      const int32_t t = memory_.receiver[First(giver) + position];
      for (int32_t n = 0; t >= 0 && n < context_.slots; ++n) {
        const int32_t offer = t * context_.slots + n;
        if (memory_.accepted[offer] != item) continue;
        memory_.taker[int64_t{job} * jobs_.width + parts] = t * context_.slots + memory_.slot_of[offer];
        memory_.rows[t * context_.instances + context_.mains + memory_.slot_of[offer]] = memory_.amount[offer];
        part[parts++] = memory_.amount[offer];
        stays -= memory_.amount[offer];
      }
    }
    memory_.rows[item] = stays;
    part[parts] = stays;
    jobs_.slot[job] = item;
    jobs_.parts[job] = parts + 1;
    for (int32_t s = 0; s < context_.ranks; ++s) {
      jobs_.weight[int64_t{job} * context_.ranks + s] = *state_.Quota(context_, s, giver, item % context_.instances);
    }
  }

  Team& team_;
  const Context& context_;
  const SpreadMemory& memory_;
  const Jobs& jobs_;
  const State& state_;
  int64_t level_;
  bool intra_;
};

// Over all ranks, then inside domains for what no other domain may hold, then over all ranks again. What it writes last
// is seen after the next barrier.
template <class Team>
TOPOEP_STAGE void Spread(Team& team, const Context& context, int64_t permille, const SpreadMemory& memory,
                         const Jobs& jobs, const State& state) {
  const int64_t level = context.Fair() * (kPermille + permille) / kPermille;
  team.Sync();
  team.ForEach(context.ranks * context.instances, [&](int32_t i) {
    memory.rows[i] = Sum(context.ranks, [&](int32_t s) {
      return *state.Quota(context, s, i / context.instances, i % context.instances);
    });
  });
  team.Sync();
  int32_t num_jobs = 0;
  for (int32_t pass = 0; pass < 3; ++pass) {
    if (pass > 0) DropIdle(team, context, memory, state);
    num_jobs = SpreadPass<Team>(team, context, memory, jobs, state, level, pass == 1).Run(num_jobs);
  }
  DropIdle(team, context, memory, state);
  LayRests(team, context, num_jobs, jobs);
  HandOut(team, context, num_jobs, memory, jobs, state, [](int32_t item) { return item; });
}

}  // namespace topoep
