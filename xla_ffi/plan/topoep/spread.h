// Busy ranks spill over to ranks with room, by intervals; topoep_jax/plan/topoep/spread.py is the same in NumPy.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_SPREAD_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_SPREAD_H_

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/topoep/apportion.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

struct SpreadMemory {
  TOPOEP_BODY SpreadMemory(const Context& context, Arena& arena)
      : rows(arena.Take<int64_t>(int64_t{context.ranks} * context.instances)),
        spill(arena.Take<int64_t>(int64_t{context.ranks} * context.instances)),
        load(arena.Take<int64_t>(context.ranks)),
        excess(arena.Take<int64_t>(context.ranks)),
        spare(arena.Take<int64_t>(context.ranks)),
        start(arena.Take<int64_t>(context.ranks)),
        order(arena.Take<int32_t>(context.ranks)),
        receiver(arena.Take<int32_t>(context.ranks)),
        takers(arena.Take<int32_t>(int64_t{context.ranks} * context.instances)),
        accepted(arena.Take<int32_t>(int64_t{context.ranks} * context.slots)),
        amount(arena.Take<int64_t>(int64_t{context.ranks} * context.slots)),
        slot_of(arena.Take<int32_t>(int64_t{context.ranks} * context.slots)),
        taker(arena.Take<int32_t>(int64_t{context.ranks} * context.slots * (context.ranks + 1))),
        blocked(arena.Take<int32_t>(context.ranks)),
        moved(arena.Take<int64_t>(int64_t{context.ranks} * context.slots)) {}

  int64_t* rows;      // [R, J]
  int64_t* spill;     // [R, J] rows above the level, of the fullest instances
  int64_t* load;      // [R]
  int64_t* excess;    // [R] sum of spill
  int64_t* spare;     // [R] rows below the level, of ranks with a free slot
  int64_t* start;     // [R] of a rank's excess or spare when all are laid end to end, largest first
  int32_t* order;     // [R] its position there
  int32_t* receiver;  // [R] ranks with spare rows by position, those of each domain behind its begin if it is a scope
  int32_t* takers;    // [R, J] ranks that accepted rows of the instance
  int32_t* accepted;  // [R, N] instances (r * J + j) that a rank takes rows from, most rows first; -1: none
  int64_t* amount;    // [R, N]
  int32_t* slot_of;   // [R, N] slot that the accepted offer gets
  int32_t* taker;     // [jobs, R + 1] slot (r * N + n) of each part of a job
  int32_t* blocked;   // [R] greedy: nothing of the rank can move
  int64_t* moved;     // [R, N] greedy: rows of each new replica
};

// Frees the slots without rows; each lane those of its ranks. No barrier.
template <class Team>
TOPOEP_BODY void DropIdle(Team& team, const Context& context, const SpreadMemory& memory, const State& state) {
  team.ForEach(context.ranks, [&](int32_t r) {
    for (int32_t n = 0; n < context.slots; ++n) {
      if (memory.rows[int64_t{r} * context.instances + context.mains + n] > 0) continue;
      state.slot_expert[int64_t{r} * context.slots + n] = -1;
    }
  });
}

// Moves the rows of a pass's jobs, whose rests are laid. No barrier.
template <class Team>
TOPOEP_BODY void MoveSpill(Team& team, const Context& context, int32_t num_jobs, const SpreadMemory& memory,
                           const Jobs& jobs, const State& state) {
  Apportion(team, context, num_jobs, jobs, [&](int32_t job, int32_t source, int32_t part, int32_t rows) {
    if (part + 1 == jobs.parts[job]) return;
    const int32_t taker = memory.taker[int64_t{job} * jobs.width + part];
    team.Add(state.Quota(context, source, taker / context.slots, context.mains + taker % context.slots), rows);
    team.Add(state.Quota(context, source, jobs.slot[job] / context.instances, jobs.slot[job] % context.instances),
             -rows);
  });
}

// A pass of spilling by intervals, over all ranks or inside each domain. Five dependent steps; it leaves jobs, and says
// how many. The rows of `old_jobs` left by the pass before are moved meanwhile.
template <class Team>
TOPOEP_STAGE int32_t SpreadPass(Team& team, const Context& context, int64_t level, bool intra, int32_t old_jobs,
                                const SpreadMemory& memory, const Jobs& jobs, const State& state) {
  const int32_t ranks = context.ranks;
  const int32_t instances = context.instances;
  const auto together = [&](int32_t a, int32_t b) { return !intra || context.DomainOf(a) == context.DomainOf(b); };
  const auto first = [&](int32_t r) { return intra ? context.domains.begin[context.DomainOf(r)] : 0; };
  team.ForEach(ranks, [&](int32_t r) {
    const int64_t* rows = memory.rows + int64_t{r} * instances;
    const int64_t limit = context.Share(r, level);
    int64_t load = 0;
    int64_t excess = 0;
    for (int32_t j = 0; j < instances; ++j) load += rows[j];
    for (int32_t j = 0; j < instances; ++j) {
      // Small instances stay whole; the fullest spill.
      int64_t below = 0;
      for (int32_t k = 0; k < instances; ++k) below += rows[k] < rows[j] || (rows[k] == rows[j] && k < j) ? rows[k] : 0;
      const int64_t with = below + rows[j] > limit ? below + rows[j] - limit : 0;
      const int64_t without = below > limit ? below - limit : 0;
      memory.spill[int64_t{r} * instances + j] = with - without;
      memory.takers[int64_t{r} * instances + j] = 0;
      excess += with - without;
    }
    memory.excess[r] = excess;
    memory.spare[r] = load < limit && state.FreeSlots(context, r) > 0 ? limit - load : 0;
    memory.receiver[r] = -1;
    for (int32_t n = 0; n < context.slots; ++n) memory.accepted[int64_t{r} * context.slots + n] = -1;
  });
  LayRests(team, context, old_jobs, jobs);
  team.ForEach(ranks, [&](int32_t r) {
    const bool gives = memory.excess[r] > 0;
    const int64_t* sizes = gives ? memory.excess : memory.spare;
    int64_t start = 0;
    int32_t order = 0;
    for (int32_t o = 0; o < ranks; ++o) {
      if (!together(r, o) || (memory.excess[o] > 0) != gives) continue;
      if (sizes[o] > sizes[r] || (sizes[o] == sizes[r] && o < r)) {
        start += sizes[o];
        ++order;
      }
    }
    memory.start[r] = start;
    memory.order[r] = order;
    if (!gives && memory.spare[r] > 0) memory.receiver[first(r) + order] = r;
  });
  MoveSpill(team, context, old_jobs, memory, jobs, state);
  team.Sync();
  // Rank t looks for what falls into its interval.
  team.ForEach(ranks, [&](int32_t t) {
    if (memory.excess[t] > 0 || memory.spare[t] == 0) return;
    const int64_t low = memory.start[t];
    const int64_t high = low + memory.spare[t];
    int32_t* accepted = memory.accepted + int64_t{t} * context.slots;
    int64_t* amounts = memory.amount + int64_t{t} * context.slots;
    const int32_t free = state.FreeSlots(context, t);
    // Item order: givers as laid, then larger spills, then lower instances.
    const auto comes_first = [&](int32_t a, int32_t b) {
      if (a / instances != b / instances) return memory.order[a / instances] < memory.order[b / instances];
      return memory.spill[a] > memory.spill[b] || (memory.spill[a] == memory.spill[b] && a < b);
    };
    for (int32_t r = 0; r < ranks; ++r) {
      if (memory.excess[r] == 0 || !together(r, t)) continue;
      if (memory.start[r] >= high || memory.start[r] + memory.excess[r] <= low) continue;
      for (int32_t j = 0; j < instances; ++j) {
        const int32_t item = r * instances + j;
        if (memory.spill[item] == 0) continue;
        int64_t start = memory.start[r];
        for (int32_t k = 0; k < instances; ++k) {
          if (k != j && comes_first(r * instances + k, item)) start += memory.spill[r * instances + k];
        }
        const int64_t from = start > low ? start : low;
        const int64_t end = start + memory.spill[item];
        const int64_t to = end < high ? end : high;
        const int32_t expert = state.ExpertOf(context, r, j);
        if (to <= from || !context.MayHold(t, expert) || state.InstanceOf(context, t, expert) >= 0) continue;
        // Insert by rows, then item order; of one expert only the first offer counts.
        int32_t item_now = item;
        int64_t amount_now = to - from;
        for (int32_t n = 0; n < free; ++n) {
          const bool wins = accepted[n] < 0 || amount_now > amounts[n] ||
                            (amount_now == amounts[n] && comes_first(item_now, accepted[n]));
          if (accepted[n] >= 0 && state.ExpertOf(context, accepted[n] / instances, accepted[n] % instances) ==
                                      state.ExpertOf(context, item_now / instances, item_now % instances)) {
            if (wins) {
              accepted[n] = item_now;
              amounts[n] = amount_now;
            }
            break;
          }
          if (!wins) continue;
          const int32_t item_next = accepted[n];
          const int64_t amount_next = amounts[n];
          accepted[n] = item_now;
          amounts[n] = amount_now;
          if (item_next < 0) break;
          item_now = item_next;
          amount_now = amount_next;
        }
      }
    }
  });
  // Offers that stand get the free slots in turn.
  team.ForEach(ranks, [&](int32_t t) {
    int32_t slot = 0;
    for (int32_t n = 0; n < context.slots; ++n) {
      const int64_t offer = int64_t{t} * context.slots + n;
      if (memory.accepted[offer] < 0) break;
      while (state.slot_expert[int64_t{t} * context.slots + slot] >= 0) ++slot;
      memory.slot_of[offer] = slot++;
      team.Add(&memory.takers[memory.accepted[offer]], 1);
    }
  });
  team.Sync();
  // A job for each instance that gives.
  team.ScanEach(
      1, ranks * instances + 1,
      [&](int32_t, int32_t item) { return int64_t{item < ranks * instances && memory.takers[item] > 0}; }, jobs.index);
  team.ForEach(ranks * instances, [&](int32_t item) {
    if (jobs.index[item + 1] == jobs.index[item]) return;
    const int64_t job = jobs.index[item];
    const int32_t giver = item / instances;
    const int32_t most = intra ? context.domains.Size(context.DomainOf(giver)) : ranks;
    jobs.slot[job] = item;
    int32_t parts = 0;
    int64_t stays = memory.rows[item];
    for (int32_t position = 0; position < most; ++position) {  // receivers in the order in which they were laid
      const int32_t t = memory.receiver[first(giver) + position];
      for (int32_t n = 0; t >= 0 && n < context.slots; ++n) {
        const int64_t offer = int64_t{t} * context.slots + n;
        if (memory.accepted[offer] != item) continue;
        memory.taker[job * jobs.width + parts] = t * context.slots + memory.slot_of[offer];
        memory.rows[int64_t{t} * instances + context.mains + memory.slot_of[offer]] = memory.amount[offer];
        jobs.part[job * jobs.width + parts] = memory.amount[offer];
        stays -= memory.amount[offer];
        ++parts;
      }
    }
    memory.rows[item] = stays;
    jobs.part[job * jobs.width + parts] = stays;
    jobs.parts[job] = parts + 1;
    for (int32_t s = 0; s < ranks; ++s) {
      jobs.weight[job * ranks + s] = *state.Quota(context, s, item / instances, item % instances);
    }
  });
  team.ForEach(ranks, [&](int32_t t) {
    for (int32_t n = 0; n < context.slots; ++n) {
      const int64_t offer = int64_t{t} * context.slots + n;
      if (memory.accepted[offer] < 0) break;
      state.slot_expert[int64_t{t} * context.slots + memory.slot_of[offer]] =
          state.ExpertOf(context, memory.accepted[offer] / instances, memory.accepted[offer] % instances);
    }
  });
  team.Sync();
  return static_cast<int32_t>(jobs.index[ranks * instances]);
}

// Over all ranks, then inside domains for what no other domain may hold, then over all ranks again. What it writes last
// is seen after the next barrier.
template <class Team>
TOPOEP_STAGE void Spread(Team& team, const Context& context, int64_t permille, const SpreadMemory& memory,
                         const Jobs& jobs, const State& state) {
  const int64_t level = context.Fair() * (1000 + permille) / 1000;
  team.Sync();
  team.ForEach(context.ranks * context.instances, [&](int32_t i) {
    int64_t rows = 0;
    for (int32_t s = 0; s < context.ranks; ++s) {
      rows += *state.Quota(context, s, i / context.instances, i % context.instances);
    }
    memory.rows[i] = rows;
  });
  team.Sync();
  int32_t num_jobs = 0;
  for (int32_t pass = 0; pass < 3; ++pass) {
    if (pass > 0) DropIdle(team, context, memory, state);
    num_jobs = SpreadPass(team, context, level, pass == 1, num_jobs, memory, jobs, state);
  }
  DropIdle(team, context, memory, state);
  LayRests(team, context, num_jobs, jobs);
  MoveSpill(team, context, num_jobs, memory, jobs, state);
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_SPREAD_H_
