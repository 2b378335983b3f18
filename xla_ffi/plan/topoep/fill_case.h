// One domain filled in one way; topoep_jax/plan/topoep/fill_case.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/links.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/select.h"

namespace topoep {

// A variant is a level up to which ranks fill, of the domain's fair one, and a bound on remote experts of a rank.
inline constexpr int32_t kVariants = 4;
inline constexpr int64_t kLowPermille = 1010;
inline constexpr int64_t kHighPermille = 1200;

// Working memory: everything for each (domain, variant), a "case"; ranks are positions in their domain.
struct FillMemory {
  TOPOEP_BODY FillMemory(const Context& context, Arena& arena)
      : cases(context.num_domains * kVariants),
        ranks(context.largest_domain),
        slots(ranks * context.slots),
        items(slots + ranks * context.mains) {
    arena.Take(int64_t{cases} * slots, &slot_expert, &slot_rows);
    arena.Take(int64_t{cases} * ranks * context.mains, &main_rows);
    arena.Take(int64_t{cases} * ranks, &load, &remote);
    arena.Take(int64_t{cases} * items, &item_expert, &item_rows, &item_placed);
    arena.Take(cases, &free_slots, &open_remote, &infeasible, &busiest, &level);
    arena.Take(int64_t{context.ranks} * context.slots, &slot_target);
    arena.Take(context.experts, &main_target);
  }

  int32_t cases;
  int32_t ranks;         // of the largest domain
  int32_t slots;         // of the largest domain
  int32_t items;         // remote experts, then pieces carved off the mains of each rank
  int32_t* slot_expert;  // [cases, slots]
  int64_t* slot_rows;
  int64_t* main_rows;  // [cases, ranks, P]
  int64_t* load;       // [cases, ranks]
  int32_t* remote;     // [cases, ranks] remote experts held
  int32_t* item_expert;
  int64_t* item_rows;  // [cases, items] still to place
  int32_t* item_placed;
  int32_t* free_slots;   // [cases]
  int32_t* open_remote;  // [cases] remote experts with rows to place
  int32_t* infeasible;
  int32_t* busiest;
  int64_t* level;        // [cases] rows of a nominal rank up to which ranks fill
  int64_t* slot_target;  // [R, N] result: rows of each slot of the state
  int64_t* main_target;  // [E] result: rows of each main
};

// One (domain, variant), seen by any lane.
class FillCase {
 public:
  TOPOEP_BODY FillCase(const Context& context, const Selection& selection, const FillMemory& memory, int32_t index)
      : context_(context),
        selection_(selection),
        memory_(memory),
        index_(index),
        domain(index / kVariants),
        variant(index % kVariants),
        size(context.domains.Size(domain)) {}

  TOPOEP_BODY int32_t RemoteLimit() const {
    if (variant % 2 == 0) return context_.slots;
    return static_cast<int32_t>(Min(Max(CeilDiv(selection_.count[domain], size), 1), context_.slots));
  }
  TOPOEP_BODY int32_t Rank(int32_t g) const { return context_.domains.Rank(domain, g); }
  TOPOEP_BODY int32_t Slots() const { return size * context_.slots; }
  TOPOEP_BODY int32_t& Expert(int32_t g, int32_t n) const { return memory_.slot_expert[SlotAt(g, n)]; }
  TOPOEP_BODY int64_t& Rows(int32_t g, int32_t n) const { return memory_.slot_rows[SlotAt(g, n)]; }
  TOPOEP_BODY int64_t& MainRows(int32_t g, int32_t a) const {
    return memory_.main_rows[(int64_t{index_} * memory_.ranks + g) * context_.mains + a];
  }
  TOPOEP_BODY int64_t& Load(int32_t g) const { return memory_.load[int64_t{index_} * memory_.ranks + g]; }
  TOPOEP_BODY int32_t& Remote(int32_t g) const { return memory_.remote[int64_t{index_} * memory_.ranks + g]; }
  TOPOEP_BODY int64_t ItemAt(int32_t item) const { return int64_t{index_} * memory_.items + item; }
  TOPOEP_BODY bool IsCarved(int32_t item) const { return item >= memory_.slots; }
  TOPOEP_BODY int64_t Room(int32_t g, int64_t level) const { return context_.Share(Rank(g), level) - Load(g); }
  TOPOEP_BODY int64_t Room(int32_t g) const { return Room(g, memory_.level[index_]); }
  TOPOEP_BODY bool IsRemote(int32_t expert) const { return context_.Home(expert) != domain; }

  TOPOEP_BODY bool Holds(int32_t g, int32_t expert) const {
    if (expert / context_.mains == Rank(g)) return true;
    for (int32_t n = 0; n < context_.slots; ++n) {
      if (Expert(g, n) == expert) return true;
    }
    return false;
  }
  TOPOEP_BODY int32_t FreeSlot(int32_t g) const {
    for (int32_t n = 0; n < context_.slots; ++n) {
      if (Expert(g, n) < 0) return n;
    }
    return -1;
  }

  // Rows of a nominal rank up to which ranks fill.
  TOPOEP_BODY int64_t StartLevel() const {
    const int64_t speed = Sum(size, [&](int32_t g) { return context_.Speed(Rank(g)); });
    const int64_t even = CeilDiv(selection_.domain_rows[domain] * kNominalSpeed, speed);
    return Max(even, context_.Fair()) * (variant < 2 ? kLowPermille : kHighPermille) / kPermille;
  }

  // Rank g: its mains' load, and pieces of the largest mains carved off down to the level; rank 0 also starts the case.
  TOPOEP_BODY void StartRank(int32_t g) const {
    const int64_t level = StartLevel();
    if (g == 0) {
      memory_.level[index_] = level;
      memory_.free_slots[index_] = Slots();
      memory_.open_remote[index_] = selection_.count[domain];  // each pays, so it has rows
      // The second bound may equal the first: then there is nothing more to try.
      memory_.infeasible[index_] = variant % 2 == 1 && RemoteLimit() == context_.slots;
    }
    for (int32_t n = 0; n < context_.slots; ++n) {
      Expert(g, n) = -1;
      Rows(g, n) = 0;
    }
    Remote(g) = 0;
    for (int32_t a = 0; a < context_.mains; ++a) MainRows(g, a) = selection_.home_rows[Rank(g) * context_.mains + a];
    Load(g) = Sum(context_.mains, [&](int32_t a) { return MainRows(g, a); });
    int64_t excess = -Room(g, level);
    for (int32_t i = 0; i < context_.mains; ++i) {
      const int32_t item = memory_.slots + g * context_.mains + i;
      memory_.item_rows[ItemAt(item)] = 0;
      if (excess <= 0) continue;
      // Carved pieces leave their main with less than it had, so the largest by original rows is the i-th.
      const int32_t a = LargestMain(g, i);
      const int64_t piece = Min(excess, MainRows(g, a));
      memory_.item_expert[ItemAt(item)] = Rank(g) * context_.mains + a;
      memory_.item_rows[ItemAt(item)] = piece;
      memory_.item_placed[ItemAt(item)] = 0;
      MainRows(g, a) -= piece;
      Load(g) -= piece;
      excess -= piece;
    }
  }

  TOPOEP_BODY bool Feasible(int32_t item, int32_t g) const {
    const int32_t expert = memory_.item_expert[ItemAt(item)];
    const int32_t free = memory_.free_slots[index_];
    const int32_t open = memory_.open_remote[index_];
    if (IsCarved(item)) {
      if (free <= open || Room(g) <= 0) return false;
    } else if (Remote(g) >= RemoteLimit() || (memory_.item_placed[ItemAt(item)] && free < open)) {
      return false;
    }
    return FreeSlot(g) >= 0 && !Holds(g, expert);
  }

  // Rows of an item that can be placed somewhere, else kNoKey.
  TOPOEP_BODY int64_t PlaceKey(int32_t item) const {
    if (memory_.infeasible[index_] || memory_.free_slots[index_] == 0) return kNoKey;
    if (!IsCarved(item) && item >= selection_.count[domain]) return kNoKey;
    if (IsCarved(item) && item - memory_.slots >= size * context_.mains) return kNoKey;
    const int64_t rows = memory_.item_rows[ItemAt(item)];
    if (rows <= 0) return kNoKey;
    for (int32_t g = 0; g < size; ++g) {
      if (Feasible(item, g)) return rows;
    }
    return kNoKey;
  }

  // Gives the item, or as much as the roomiest rank has room for, a slot there.
  TOPOEP_BODY void Place(int32_t item) const {
    const int32_t target = FindFirst(
        size, [&](int32_t g) { return Feasible(item, g); }, [&](int32_t g, int32_t h) { return Room(g) > Room(h); });
    int64_t& left = memory_.item_rows[ItemAt(item)];
    const int64_t room = Room(target);
    const bool split =
        room > 0 && room < left && (IsCarved(item) || memory_.free_slots[index_] > memory_.open_remote[index_]);
    const int64_t rows = split ? room : left;
    const int32_t slot = FreeSlot(target);
    Expert(target, slot) = memory_.item_expert[ItemAt(item)];
    Rows(target, slot) = rows;
    Load(target) += rows;
    left -= rows;
    memory_.item_placed[ItemAt(item)] = 1;
    --memory_.free_slots[index_];
    if (!IsCarved(item)) {
      ++Remote(target);
      if (left == 0) --memory_.open_remote[index_];
    }
  }

  // What found no slot: a carved piece returns to its main, a remote expert's rows go to its least loaded holder.
  TOPOEP_BODY bool Return(int32_t item) const {
    const int64_t rows = memory_.item_rows[ItemAt(item)];
    if (rows <= 0) return true;
    const int32_t expert = memory_.item_expert[ItemAt(item)];
    if (IsCarved(item)) {
      MainRows((item - memory_.slots) / context_.mains, expert % context_.mains) += rows;
      return true;
    }
    const int32_t holder = FindFirst(
        size, [&](int32_t g) { return Holds(g, expert); }, [&](int32_t g, int32_t h) { return Load(g) < Load(h); });
    if (holder >= 0) AddRows(holder, expert, rows);
    return holder >= 0;
  }

  // To the instance of an expert on position g, its main or a slot.
  TOPOEP_BODY void AddRows(int32_t g, int32_t expert, int64_t rows) const {
    if (expert / context_.mains == Rank(g)) MainRows(g, expert % context_.mains) += rows;
    for (int32_t n = 0; n < context_.slots; ++n) {
      if (Expert(g, n) == expert) Rows(g, n) += rows;
    }
  }

  // After the last placement: nothing stays without an instance, and loads are what they are then.
  TOPOEP_BODY void Settle() const {
    const int32_t carved = memory_.slots + size * context_.mains;
    for (int32_t item = 0; item < carved; ++item) {
      if (item < selection_.count[domain] || IsCarved(item)) memory_.infeasible[index_] += !Return(item);
    }
    CountLoads();
    FindBusiest();
  }
  TOPOEP_BODY void CountLoads() const {
    for (int32_t g = 0; g < size; ++g) {
      Load(g) = Sum(context_.mains, [&](int32_t a) { return MainRows(g, a); }) +
                Sum(context_.slots, [&](int32_t n) { return Rows(g, n); });
    }
  }
  TOPOEP_BODY void FindBusiest() const {
    memory_.busiest[index_] =
        FindFirst(size, [](int32_t) { return true; }, [&](int32_t g, int32_t h) { return LevelOf(g) > LevelOf(h); });
  }

  // Rows that the busiest rank can hand to position g from its instance j, twice, plus 1 if g holds the expert already.
  TOPOEP_BODY int64_t MoveKey(int32_t g, int32_t j) const {
    if (memory_.infeasible[index_] || g >= size) return kNoKey;
    const int32_t busiest = memory_.busiest[index_];
    if (g == busiest) return kNoKey;
    const int64_t ours = context_.Speed(Rank(busiest));
    const int64_t theirs = context_.Speed(Rank(g));
    const int64_t gap = Load(busiest) * theirs - Load(g) * ours;
    const int64_t amount = Min(Max(gap, 0) / (ours + theirs), InstanceRows(busiest, j));
    if (amount <= 0) return kNoKey;
    const int32_t expert = InstanceExpert(busiest, j);
    const bool held = Holds(g, expert);
    if (!held && (FreeSlot(g) < 0 || (IsRemote(expert) && Remote(g) >= RemoteLimit()))) return kNoKey;
    return 2 * amount + held;
  }

  TOPOEP_BODY void Move(int32_t g, int32_t j, int64_t amount) const {
    const int32_t busiest = memory_.busiest[index_];
    const int32_t expert = InstanceExpert(busiest, j);
    const bool held = Holds(g, expert);
    Load(busiest) -= amount;
    Load(g) += amount;
    if (j < context_.mains) {
      MainRows(busiest, j) -= amount;
    } else {
      const int32_t slot = j - context_.mains;
      Rows(busiest, slot) -= amount;
      if (Rows(busiest, slot) == 0) {
        Expert(busiest, slot) = -1;
        if (IsRemote(expert)) --Remote(busiest);
      }
    }
    if (!held) {
      const int32_t slot = FreeSlot(g);
      Expert(g, slot) = expert;
      Rows(g, slot) = amount;
      if (IsRemote(expert)) ++Remote(g);
    } else {
      AddRows(g, expert, amount);
    }
  }

  // Time of the slowest rank and of the busiest rank's pulls.
  TOPOEP_BODY int64_t Cost() const {
    int64_t level = 0;
    int64_t most[2] = {};  // intra, inter
    for (int32_t g = 0; g < size; ++g) {
      level = Max(level, LevelOf(g));
      for (const bool inter : {false, true}) {
        most[inter] = Max(most[inter], Sum(context_.slots, [&](int32_t n) {
                            return Expert(g, n) >= 0 && Rows(g, n) != 0 && IsRemote(Expert(g, n)) == inter;
                          }));
      }
    }
    const CostModel& cost = context_.problem->cost;
    return cost.row_ps * level + LinksPs(cost, cost.expert_bytes * most[1], cost.expert_bytes * most[0]);
  }

 private:
  TOPOEP_BODY int64_t LevelOf(int32_t g) const { return context_.Level(Rank(g), Load(g)); }
  TOPOEP_BODY int64_t SlotAt(int32_t g, int32_t n) const {
    return int64_t{index_} * memory_.slots + g * context_.slots + n;
  }
  TOPOEP_BODY int32_t InstanceExpert(int32_t g, int32_t j) const {
    return j < context_.mains ? Rank(g) * context_.mains + j : Expert(g, j - context_.mains);
  }
  TOPOEP_BODY int64_t InstanceRows(int32_t g, int32_t j) const {
    if (j < context_.mains) return MainRows(g, j);
    return Expert(g, j - context_.mains) < 0 ? 0 : Rows(g, j - context_.mains);
  }
  // The main of position g with the i-th most rows before carving, lowest first among equals.
  TOPOEP_BODY int32_t LargestMain(int32_t g, int32_t i) const {
    const int64_t* rows = selection_.home_rows + int64_t{Rank(g)} * context_.mains;
    for (int32_t a = 0; a < context_.mains; ++a) {
      if (Sum(context_.mains, [&](int32_t b) { return IsLess(rows[a], rows[b], b, a); }) == i) return a;
    }
    return -1;
  }

  const Context& context_;
  const Selection& selection_;
  const FillMemory& memory_;
  int32_t index_;

 public:
  int32_t domain;
  int32_t variant;
  int32_t size;  // ranks of the domain
};

}  // namespace topoep
