// The paper's two-stage planner (section 4.3); topoep_jax/plan/paper.py is the same in NumPy.
//
// Stage 1 has a closed form: a domain's i-th best remote expert goes to its rank i mod G, slot i / G. It leaves at most
// one instance of an expert in each domain, so that the even split needs no list of holders. Stage 2 runs in all
// domains side by side, for their ranks are disjoint.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/state.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// A move of stage 2 in one domain.
struct PaperMove {
  int64_t rows;  // 0: the domain is finished
  int32_t from;  // rank
  int32_t from_instance;
  int32_t to;
  int32_t to_instance;
};

struct PaperMemory {
  TOPOEP_BODY PaperMemory(const Context& context, Arena& arena) {
    arena.Take(int64_t{context.num_domains} * context.experts, &holder);
    arena.Take(context.ranks, &used, &load);
    arena.Take(int64_t{context.ranks} * context.instances, &order, &instance_load);
    arena.Take(context.num_domains, &busiest);
    arena.Take(2 * int64_t{context.num_domains}, &moves);
    arena.Take(int64_t{context.num_domains} * context.ranks, &before);
  }

  int32_t* holder;         // [M, E] the domain's rank * J + instance with the expert after stage 1, -1: none
  int32_t* used;           // [R] slots in use; one that lost its rows stays used
  int32_t* order;          // [R, J] instances of a rank in ascending expert id, the used ones
  int64_t* instance_load;  // [R, J]
  int64_t* load;           // [R]
  int32_t* busiest;        // [M]
  PaperMove* moves;        // [2, M] of this round and the last one, in turn
  int64_t* before;         // [M, R] rows that a move finds at the sources before a source
};

// Stage 1, from the empty plan. Slots fill in order of demand.
template <class Team>
TOPOEP_STAGE void PlaceRemoteExperts(Team& team, const Context& context, const PaperMemory& memory,
                                     const State& state) {
  SetEmpty(team, context, state);
  team.ForEach(context.ranks, [&](int32_t rank) {
    memory.used[rank] = 0;
    memory.load[rank] = 0;
  });
  team.Sync();
  team.ForEach(context.num_domains * context.experts, [&](int32_t i) {
    const int32_t domain = i / context.experts;
    const int32_t expert = i % context.experts;
    memory.holder[i] = -1;
    if (context.Home(expert) == domain) memory.holder[i] = context.MainItem(expert);
    if (!context.Pays(domain, expert)) return;
    const int32_t better = context.ranking[i];
    const int32_t size = context.domains.Size(domain);
    if (better >= size * context.slots) return;
    const int32_t rank = context.domains.Rank(domain, better % size);
    state.slot_expert[rank * context.slots + better / size] = expert;
    memory.holder[i] = rank * context.instances + context.mains + better / size;
    team.Add(&memory.used[rank], 1);
  });
  team.Sync();
}

// Rows go to the instance in the source's domain, or else evenly to all; the remainder starts at another holder for
// each source.
template <class Team>
TOPOEP_STAGE void SplitEvenly(Team& team, const Context& context, const PaperMemory& memory, const State& state) {
  team.ForEach(context.ranks * context.experts, [&](int32_t i) {
    const int32_t source = i / context.experts;
    const int32_t expert = i % context.experts;
    const int32_t rows = context.problem->omega[i];
    const auto quota = [&](int32_t holder) -> int32_t& {
      return *state.Quota(context, source, holder / context.instances, holder % context.instances);
    };
    const int32_t intra = memory.holder[context.At(context.DomainOf(source), expert)];
    const int32_t main = context.MainItem(expert);
    if (intra == main || rows == 0) return;  // the empty plan has them there
    quota(main) = 0;
    if (intra >= 0) {
      quota(intra) = rows;
      return;
    }
    int32_t count = 0;
    for (int32_t d = 0; d < context.num_domains; ++d) count += memory.holder[context.At(d, expert)] >= 0;
    const int32_t base = rows / count;
    const int32_t remainder = rows % count;
    for (int32_t d = 0; d < context.num_domains; ++d) {
      const int32_t holder = memory.holder[context.At(d, expert)];
      if (holder < 0) continue;
      int32_t position = 0;  // among the holders by rank
      for (int32_t other = 0; other < context.num_domains; ++other) {
        const int32_t rival = memory.holder[context.At(other, expert)];
        position += rival >= 0 && rival < holder;
      }
      const int32_t turn = ((position - source) % count + count) % count;
      quota(holder) = base + (turn < remainder ? 1 : 0);
    }
  });
  team.Sync();
}

// Loads, and the order of instances.
template <class Team>
TOPOEP_BODY void CountLoads(Team& team, const Context& context, const PaperMemory& memory, const State& state) {
  team.ForEach(context.ranks * context.instances, [&](int32_t i) {
    const int32_t rank = i / context.instances;
    const int32_t instance = i % context.instances;
    const int64_t rows =
        Sum(context.ranks, [&](int32_t source) { return *state.Quota(context, source, rank, instance); });
    memory.instance_load[i] = rows;
    team.Add(&memory.load[rank], rows);
    const int32_t expert = state.ExpertOf(context, rank, instance);
    if (expert < 0) return;  // without rows, as it may become a replica
    const int64_t lower = Sum(context.instances, [&](int32_t j) {
      const int32_t other = state.ExpertOf(context, rank, j);
      return other >= 0 && other < expert;
    });
    memory.order[rank * context.instances + lower] = instance;
  });
  team.Sync();
}

// The rank of a domain with the most rows, the lowest of equals; 0 for a domain without ranks.
TOPOEP_BODY inline int32_t BusiestRank(const Context& context, const PaperMemory& memory, int32_t domain) {
  const auto load = [&](int32_t at) { return memory.load[context.domains.Rank(domain, at)]; };
  const int32_t at = FindFirst(
      context.domains.Size(domain), [](int32_t) { return true; },
      [&](int32_t i, int32_t j) { return load(i) > load(j); });
  return at < 0 ? 0 : context.domains.Rank(domain, at);
}

// A free slot of `rank` becomes a replica of the expert; returns its instance.
TOPOEP_BODY inline int32_t PlaceReplica(const Context& context, const PaperMemory& memory, const State& state,
                                        int32_t rank, int32_t expert) {
  const int32_t instance = context.mains + memory.used[rank];
  int32_t* order = memory.order + rank * context.instances;
  int32_t at = context.mains + memory.used[rank]++;
  for (; at > 0 && state.ExpertOf(context, rank, order[at - 1]) > expert; --at) order[at] = order[at - 1];
  order[at] = instance;
  state.slot_expert[rank * context.slots + instance - context.mains] = expert;
  return instance;
}

// Option i of a domain's busiest rank: rows of its i % J-th instance, by expert, for the rank at position i / J.
TOPOEP_BODY inline PaperMove MoveAt(const Context& context, const PaperMemory& memory, int32_t domain, int32_t i) {
  PaperMove move{};
  move.from = memory.busiest[domain];
  move.from_instance = memory.order[move.from * context.instances + i % context.instances];
  move.to = context.domains.Rank(domain, i / context.instances);
  move.rows = Min(memory.instance_load[move.from * context.instances + move.from_instance],
                  (memory.load[move.from] - memory.load[move.to]) / 2);
  return move;
}

// Preferred are large moves, then light targets, then targets that hold the expert, then pulls inside the domain, then
// low rank and expert.
TOPOEP_BODY inline int64_t MoveKey(const Context& context, const PaperMemory& memory, const State& state,
                                   int32_t domain, int32_t i) {
  if (i / context.instances >= context.domains.Size(domain)) return kNoKey;
  if (i % context.instances >= context.mains + memory.used[memory.busiest[domain]]) return kNoKey;
  const PaperMove move = MoveAt(context, memory, domain, i);
  if (move.rows == 0) return kNoKey;
  const int32_t expert = state.ExpertOf(context, move.from, move.from_instance);
  const bool held = state.InstanceOf(context, move.to, expert) >= 0;
  if (!held && memory.used[move.to] == context.slots) return kNoKey;
  uint64_t preference = context.Home(expert) == domain ? 1 : 0;
  if (held) preference = 2;
  const uint64_t lightness = static_cast<uint64_t>(kMaxRows - memory.load[move.to]);
  // 31, 31 and 2 bits: rows come first. Zero rows do not compete, so that no key is kNoKey.
  const uint64_t bits = static_cast<uint64_t>(move.rows) << 33 | lightness << 2 | preference;
  return static_cast<int64_t>(bits ^ uint64_t{1} << 63);
}

// A domain's next move, with all that it changes but quotas.
TOPOEP_BODY inline PaperMove Decide(const Context& context, const PaperMemory& memory, const State& state,
                                    int32_t domain, Best best) {
  if (!best.Found()) return PaperMove{};
  PaperMove move = MoveAt(context, memory, domain, best.index);
  const int32_t expert = state.ExpertOf(context, move.from, move.from_instance);
  move.to_instance = state.InstanceOf(context, move.to, expert);
  if (move.to_instance < 0) move.to_instance = PlaceReplica(context, memory, state, move.to, expert);
  memory.instance_load[move.from * context.instances + move.from_instance] -= move.rows;
  memory.instance_load[move.to * context.instances + move.to_instance] += move.rows;
  memory.load[move.from] -= move.rows;
  memory.load[move.to] += move.rows;
  memory.busiest[domain] = BusiestRank(context, memory, domain);
  return move;
}

// Stage 2: in every domain the busiest rank gives rows of one expert to a neighbour, at most half of the gap, until it
// cannot. Two dependent steps a move. Ends with a barrier after the last one.
template <class Team>
TOPOEP_STAGE void ShedHalfGaps(Team& team, const Context& context, const PaperMemory& memory, const State& state) {
  team.ForEach(context.num_domains, [&](int32_t d) { memory.busiest[d] = BusiestRank(context, memory, d); });
  team.Sync();
  // Quotas are not read before the next barrier, so that lanes may still be moving rows of the last round.
  PaperMove* moves = memory.moves;
  while (true) {
    team.ArgMaxEach(
        context.num_domains, context.largest_domain * context.instances,
        [&](int32_t domain, int32_t i) { return MoveKey(context, memory, state, domain, i); },
        [&](int32_t domain, Best best) { moves[domain] = Decide(context, memory, state, domain, best); });
    if (Sum(context.num_domains, [&](int32_t d) { return moves[d].rows; }) == 0) return;
    team.ScanEach(
        context.num_domains, context.ranks,
        [&](int32_t domain, int32_t source) {
          const PaperMove& move = moves[domain];
          return move.rows == 0 ? int64_t{0} : *state.Quota(context, source, move.from, move.from_instance);
        },
        memory.before);
    // The rows of the sources in ascending order, until the move has what it wants.
    team.ForEach(context.num_domains * context.ranks, [&](int32_t i) {
      const PaperMove& move = moves[i / context.ranks];
      const int64_t wanted = move.rows - memory.before[i];
      if (wanted <= 0) return;
      int32_t* from = state.Quota(context, i % context.ranks, move.from, move.from_instance);
      const int32_t taken = static_cast<int32_t>(Min(wanted, *from));
      *from -= taken;
      *state.Quota(context, i % context.ranks, move.to, move.to_instance) += taken;
    });
    moves = moves == memory.moves ? moves + context.num_domains : memory.moves;
  }
}

// Drops replicas that lost all their rows. Ends with a barrier.
template <class Team>
TOPOEP_BODY void FreeIdleSlots(Team& team, const Context& context, const State& state) {
  team.ForEach(context.ranks * context.slots, [&](int32_t i) {
    const int32_t rank = i / context.slots;
    const int32_t instance = context.mains + i % context.slots;
    for (int32_t source = 0; source < context.ranks; ++source) {
      if (*state.Quota(context, source, rank, instance) != 0) return;
    }
    state.slot_expert[i] = -1;
  });
  team.Sync();
}

// Writes slots (in order of placement) and quotas. Demand must be valid and Prepare() done. Ends with a barrier.
template <class Team>
TOPOEP_BODY void PaperPlan(Team& team, const Context& context, const PaperMemory& memory, const State& state) {
  PlaceRemoteExperts(team, context, memory, state);
  SplitEvenly(team, context, memory, state);
  CountLoads(team, context, memory, state);
  ShedHalfGaps(team, context, memory, state);
  FreeIdleSlots(team, context, state);
}

}  // namespace topoep
