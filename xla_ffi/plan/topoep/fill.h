// Fills the slots of every domain on its own; topoep_jax/plan/topoep/fill.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/fill_case.h"
#include "xla_ffi/plan/topoep/select.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// Leaves slot_expert in the state, and the rows each instance is to get in slot_target and main_target. A dependent
// step for each slot of the largest domain and each move, and three more.
template <class Team>
TOPOEP_STAGE void Fill(Team& team, const Context& context, const Selection& selection, const FillMemory& memory,
                       int32_t moves, const State& state) {
  const auto at = [&](int32_t index) { return FillCase(context, selection, memory, index); };
  team.ForEach(memory.cases * memory.ranks, [&](int32_t i) {
    const FillCase fill = at(i / memory.ranks);
    if (i % memory.ranks < fill.size) fill.StartRank(i % memory.ranks);
  });
  team.ForEach(memory.cases * memory.slots, [&](int32_t i) {
    const FillCase fill = at(i / memory.slots);
    const int32_t item = i % memory.slots;
    if (item >= selection.count[fill.domain]) return;
    const int32_t expert = selection.selected[int64_t{fill.domain} * selection.width + item];
    memory.item_expert[fill.ItemAt(item)] = expert;
    memory.item_rows[fill.ItemAt(item)] = context.demand[context.At(fill.domain, expert)];
    memory.item_placed[fill.ItemAt(item)] = 0;
  });
  team.Sync();
  for (int32_t step = 0; step < memory.slots; ++step) {
    team.ArgMaxEach(
        memory.cases, memory.items, [&](int32_t i, int32_t item) { return at(i).PlaceKey(item); },
        [&](int32_t i, Best best) {
          if (best.Found()) at(i).Place(best.index);
        });
  }
  team.ForEach(memory.cases, [&](int32_t i) { at(i).Settle(); });
  team.Sync();
  for (int32_t step = 0; step < moves; ++step) {
    team.ArgMaxEach(
        memory.cases, memory.ranks * context.instances,
        [&](int32_t i, int32_t k) { return at(i).MoveKey(k / context.instances, k % context.instances); },
        [&](int32_t i, Best best) {
          if (!best.Found()) return;
          at(i).Move(best.index / context.instances, best.index % context.instances, best.key / 2);
          at(i).FindBusiest();
        });
  }
  team.ForEach(context.ranks, [&](int32_t rank) {
    const int32_t first = context.DomainOf(rank) * kVariants;
    int32_t chosen = first;
    int64_t cost = at(first).Cost();
    for (int32_t i = first + 1; i < first + kVariants; ++i) {
      if (memory.infeasible[i]) continue;
      const int64_t other = at(i).Cost();
      if (other >= cost) continue;
      chosen = i;
      cost = other;
    }
    const FillCase fill = at(chosen);
    const int32_t g = context.domains.position[rank];
    for (int32_t a = 0; a < context.mains; ++a) memory.main_target[rank * context.mains + a] = fill.MainRows(g, a);
    for (int32_t n = 0; n < context.slots; ++n) {
      const int32_t slot = rank * context.slots + n;
      const bool used = fill.Expert(g, n) >= 0 && fill.Rows(g, n) > 0;
      state.slot_expert[slot] = used ? fill.Expert(g, n) : -1;
      memory.slot_target[slot] = used ? fill.Rows(g, n) : 0;
    }
  });
  team.Sync();
}

}  // namespace topoep
