// Whose gradients go where in one push, as one rank sees it: from its slots to their owners, and from all replicas of
// its mains into its staging.
//
// An owner's staging has two halves. Each holds one piece of every replica's gradient at a time, the replicas in
// ascending (rank, slot): piece k of the c-th of C replicas is at half k % 2, position c x piece, and bytes k x piece
// up to (k + 1) x piece of the gradient, where piece = floor(half / C) at a grain. So the staging holds any plan's
// gradients.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/team.h"
#include "xla_ffi/transfer/placement.h"
#include "xla_ffi/transfer/windows.h"

namespace topoep {

// A replica of one of this rank's mains.
struct Replica {
  int32_t main;   // row of the gradient that it is added to
  int32_t first;  // 1: no replica of this main comes before it
  int32_t next;   // of this main, -1: none
};

// A slot of this rank.
struct SlotGradient {
  int32_t owner;  // -1: empty
  int32_t index;  // among the owner's replicas
  int64_t piece;  // bytes
};

// Made on the host over host or device memory, then passed by value.
struct PushSchedule : RankLayer {
  int64_t half_bytes;  // of the staging, a multiple of kGrain and at least kGrain x R x N

  SlotGradient* slots;   // [N]
  Replica* replicas;     // [replicas_of[rank]], ascending (rank, slot)
  int32_t* replicas_of;  // [R] slots that hold an expert of a rank
  int32_t* from;         // [R] slots of a rank that hold an expert of this rank
  int64_t* at;           // [1 + N, R x N] working memory

  PushSchedule() = default;
  PushSchedule(const Problem& problem, int32_t rank, int64_t row_bytes, int64_t half_bytes, Arena& arena)
      : RankLayer{rank, problem.num_ranks, problem.num_slots, problem.MainsPerRank(), row_bytes},
        half_bytes(half_bytes) {
    arena.Take(num_slots, &slots);
    arena.Take(int64_t{num_ranks} * num_slots, &replicas);
    arena.Take(num_ranks, &replicas_of, &from);
    arena.Take((1 + int64_t{num_slots}) * num_ranks * num_slots, &at);
  }

  TOPOEP_BODY int64_t PieceOf(int32_t owner) const { return RoundDown(half_bytes / replicas_of[owner]); }
};

// Fills `schedule` for slot_expert [R, N] in 2 dependent steps. Ends without a barrier.
template <class Team>
TOPOEP_BODY void MakePushSchedule(Team& team, const int32_t* slot_expert, const PushSchedule& schedule) {
  const int32_t num_slots = schedule.num_slots;
  const int32_t num_items = schedule.num_ranks * num_slots;
  const int32_t mine = schedule.rank * num_slots;
  const auto owner_of = [&](int32_t i) { return slot_expert[i] < 0 ? -1 : slot_expert[i] / schedule.mains_per_rank; };
  team.ForEach(schedule.num_ranks, [&](int32_t rank) {
    schedule.replicas_of[rank] = 0;
    schedule.from[rank] = 0;
  });
  team.Sync();
  team.ForEach(num_items, [&](int32_t i) {
    const int32_t owner = owner_of(i);
    if (owner < 0) return;
    team.Add(&schedule.replicas_of[owner], int32_t{1});
    if (owner == schedule.rank) team.Add(&schedule.from[i / num_slots], int32_t{1});
  });
  // Ends with the barrier that the counts need, too. Before a replica: those of the same owner, for this rank as owner
  // and for the owner of each of its slots.
  team.ScanEach(
      1 + num_slots, num_items,
      [&](int32_t segment, int32_t i) {
        const int32_t owner = segment == 0 ? schedule.rank : owner_of(mine + segment - 1);
        return owner >= 0 && owner_of(i) == owner ? 1 : 0;
      },
      schedule.at);
  team.ForEach(num_items, [&](int32_t i) {
    const int32_t expert = slot_expert[i];
    if (owner_of(i) != schedule.rank) return;
    int32_t before = i - 1;
    while (before >= 0 && slot_expert[before] != expert) --before;
    int32_t after = i + 1;
    while (after < num_items && slot_expert[after] != expert) ++after;
    schedule.replicas[schedule.at[i]] = {expert % schedule.mains_per_rank, before < 0 ? 1 : 0,
                                         after < num_items ? static_cast<int32_t>(schedule.at[after]) : -1};
  });
  team.ForEach(num_slots, [&](int32_t slot) {
    const int32_t owner = owner_of(mine + slot);
    if (owner < 0) {
      schedule.slots[slot] = {-1, 0, 0};
      return;
    }
    const int64_t index = schedule.at[int64_t{1 + slot} * num_items + mine + slot];
    schedule.slots[slot] = {owner, static_cast<int32_t>(index), schedule.PieceOf(owner)};
  });
}

}  // namespace topoep
