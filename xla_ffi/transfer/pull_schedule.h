// The copies of a plan's pulls in which one rank takes part: those of topoep_jax/plan/pulls.py, with the place of every
// byte. Every rank derives its own view from slot_expert; the two sides of a copy agree because both follow the plan.
//
// A copy of hop h reads what the mains' rank published (h = 0) or what earlier hops brought to its source. A slice that
// is spread over the owner's domain lands in the slot of its rank where that rank holds the expert anyhow, else in a
// stripe: row q of the window is for the domain's q-th replicated expert, and stays unused where the expert has no
// slice to keep.

#pragma once

#include <algorithm>
#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/links.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/pulls.h"
#include "xla_ffi/team/team.h"
#include "xla_ffi/transfer/placement.h"
#include "xla_ffi/transfer/windows.h"

namespace topoep {

struct Copy {
  int32_t peer = -1;  // the other rank; -1: no copy
  int32_t hop;
  int32_t expert;
  int32_t slice;  // of `slices` parts of the expert's padded parameters
  int32_t slices;
  int32_t from;  // Window and row at the source
  int32_t from_row;
  int32_t to;  // Window and row at the target
  int32_t to_row;

  TOPOEP_BODY Range Bytes(int64_t pitch) const { return PartOf(pitch, slice, slices); }

  // Where byte `at` of the expert lies in row `row` of `window`, at either end.
  TOPOEP_BODY int64_t Place(int32_t window, int32_t row, int64_t at, int64_t pitch) const {
    if (window != kStripes) return row * pitch + at;
    return row * StripePitch(pitch, slices) + (at - Bytes(pitch).begin);
  }
};

// Memory and sizes. Made on the host over host or device memory, then passed by value.
struct PullSchedule : RankLayer {
  int32_t largest_domain = 0;
  int64_t pitch;  // of an expert in windows

  int32_t* num_hops;        // [1]
  int32_t* holders;         // [E] slots that hold an expert
  int32_t* held;            // [N] expert in a slot of this rank, -1 if none
  Copy* incoming;           // by hop
  int32_t* incoming_begin;  // [kMaxHops + 1]
  Copy* outgoing;
  int32_t* outgoing_begin;
  int32_t* receives;  // [kMaxHops, R] copies from a rank in a hop
  int32_t* sends;     // [kMaxHops, R] copies to a rank in a hop

  // Working memory.
  Copy* items;
  int64_t* at;      // [kMaxHops, items]
  int64_t* stripe;  // [E] by domain: replicated experts before it
  int64_t* words;   // of PullCounts and Links
  Best* bests;      // of Links

  PullSchedule() = default;
  PullSchedule(const Problem& problem, const Domains& domains, int32_t rank, int64_t row_bytes, Arena& arena)
      : RankLayer{rank, problem.num_ranks, problem.num_slots, problem.MainsPerRank(), row_bytes},
        pitch(RoundUp(row_bytes)) {
    for (int32_t d = 0; d < problem.num_domains; ++d) largest_domain = std::max(largest_domain, domains.Size(d));
    const int32_t most = std::max(NumIncoming(), NumOutgoing());
    arena.Take(1, &num_hops);
    arena.Take(problem.num_experts, &holders, &stripe);
    arena.Take(num_slots, &held);
    arena.Take(NumIncoming(), &incoming);
    arena.Take(NumOutgoing(), &outgoing);
    arena.Take(kMaxHops + 1, &incoming_begin, &outgoing_begin);
    arena.Take(kMaxHops * num_ranks, &receives, &sends);
    arena.Take(most, &items);
    arena.Take(kMaxHops * int64_t{most}, &at);
    arena.Take(PullCounts::NumWords(problem) + Links::NumWords(num_ranks), &words);
    arena.Take(Links::kNumBests, &bests);
  }

  // Items that may be copies: slices of the domain's experts, then parts of slots.
  TOPOEP_BODY int32_t NumSpread() const { return mains_per_rank * largest_domain; }
  TOPOEP_BODY int32_t NumIncoming() const { return NumSpread() + num_slots * largest_domain; }
  TOPOEP_BODY int32_t NumOutgoing() const { return NumSpread() + num_ranks * num_slots; }
};

// What every copy of a plan follows from, as seen by one rank.
class CopyRules {
 public:
  TOPOEP_BODY CopyRules(const Problem& problem, const Domains& domains, const int32_t* slot_expert, Pulls mode,
                        const PullSchedule& schedule)
      : problem_(problem),
        domains_(domains),
        slot_expert_(slot_expert),
        mode_(mode),
        s_(schedule),
        home_(problem.domain_of_rank[schedule.rank]) {}

  TOPOEP_BODY Copy Incoming(int32_t item) const {
    if (item < s_.NumSpread()) return Spread(item, false);
    const int32_t at = item - s_.NumSpread();
    return Fill(s_.rank, at / s_.largest_domain, at % s_.largest_domain, false);
  }

  TOPOEP_BODY Copy Outgoing(int32_t item) const {
    if (item < s_.NumSpread()) return Spread(item, true);
    const int32_t at = item - s_.NumSpread();
    return Fill(at / s_.num_slots, at % s_.num_slots, domains_.position[s_.rank], true);
  }

 private:
  TOPOEP_BODY int32_t SlotOf(int32_t rank, int32_t expert) const {
    for (int32_t slot = 0; slot < problem_.num_slots; ++slot) {
      if (slot_expert_[int64_t{rank} * problem_.num_slots + slot] == expert) return slot;
    }
    return -1;
  }

  // Window and row in which `rank`, of the expert's domain, keeps its slice of it.
  TOPOEP_BODY void Keep(int32_t rank, int32_t expert, int32_t* window, int32_t* row) const {
    const int32_t slot = SlotOf(rank, expert);
    const int32_t begin = domains_.begin[problem_.DomainOfExpert(expert)] * problem_.MainsPerRank();
    *window = slot >= 0 ? kSlots : kStripes;
    *row = slot >= 0 ? slot : static_cast<int32_t>(s_.stripe[Ordinal(expert)] - s_.stripe[begin]);
  }

  // The slice of an expert that its owner spreads over this domain: to this rank or, if `sends`, from it.
  TOPOEP_BODY Copy Spread(int32_t item, bool sends) const {
    const int32_t position = item / s_.mains_per_rank;
    if (mode_ != Pulls::kStriped || position >= domains_.Size(home_)) return {};
    const int32_t peer = domains_.Rank(home_, position);
    const int32_t target = sends ? peer : s_.rank;
    const int32_t main = item % s_.mains_per_rank;
    const int32_t expert = (sends ? s_.rank : peer) * s_.mains_per_rank + main;
    if (peer == s_.rank || s_.holders[expert] == 0) return {};
    Copy copy{peer, 0, expert, domains_.position[target], domains_.Size(home_), kMains, main, 0, 0};
    Keep(target, expert, &copy.to, &copy.to_row);
    return copy;
  }

  // Part `part` of what fills a slot, as seen by the rank that holds it or, if `sends`, by this rank.
  TOPOEP_BODY Copy Fill(int32_t rank, int32_t slot, int32_t part, bool sends) const {
    const int32_t expert = slot_expert_[int64_t{rank} * problem_.num_slots + slot];
    if (expert < 0) return {};
    const int32_t owner = problem_.MainRank(expert);
    const int32_t origin = problem_.domain_of_rank[owner];
    const bool striped = mode_ == Pulls::kStriped;
    Copy copy{owner, 0, expert, 0, 1, kMains, expert % problem_.MainsPerRank(), kSlots, slot};
    int32_t first = rank;
    if (mode_ != Pulls::kDirect && origin != problem_.domain_of_rank[rank]) {
      first = FirstHolder(problem_, domains_, slot_expert_, rank, expert);
    }
    if (first != rank) {
      copy.peer = first;
      copy.hop = striped ? 2 : 1;
      copy.from = kSlots;
      copy.from_row = SlotOf(first, expert);
    } else if (striped) {
      // A rank outside of the owner's domain sends none of the slices.
      if (part >= domains_.Size(origin) || (sends && home_ != origin)) return {};
      copy.peer = domains_.Rank(origin, part);
      copy.slice = part;
      copy.slices = domains_.Size(origin);
      if (copy.peer == rank) return {};  // the owner spread it there
      if (copy.peer != owner) {
        copy.hop = 1;
        Keep(copy.peer, expert, &copy.from, &copy.from_row);
      }
    }
    if (!sends) return part == 0 || copy.slices > 1 ? copy : Copy{};
    if (copy.peer != s_.rank) return {};
    copy.peer = rank;
    return copy;
  }

  // Place of an expert in the order of domains.
  TOPOEP_BODY int32_t Ordinal(int32_t expert) const {
    const int32_t owner = problem_.MainRank(expert);
    const int32_t place = domains_.begin[problem_.domain_of_rank[owner]] + domains_.position[owner];
    return place * problem_.MainsPerRank() + expert % problem_.MainsPerRank();
  }

  const Problem& problem_;
  const Domains& domains_;
  const int32_t* slot_expert_;
  Pulls mode_;
  const PullSchedule& s_;
  int32_t home_;
};

// The items that are copies, by hop; `count` [kMaxHops, R] is added to. Ends without a barrier.
template <class Team, class Item>
TOPOEP_BODY void ListCopies(Team& team, const PullSchedule& schedule, int32_t n, Item item, Copy* list, int32_t* begin,
                            int32_t* count) {
  Copy* const items = schedule.items;
  int64_t* const at = schedule.at;
  team.ForEach(n, [&](int32_t i) { items[i] = item(i); });
  team.Sync();
  team.ScanEach(
      kMaxHops, n, [&](int32_t hop, int32_t i) { return items[i].peer >= 0 && items[i].hop == hop ? 1 : 0; }, at);
  const auto first_of = [&](int32_t hop) {
    int64_t first = 0;
    for (int32_t h = 0; h < hop && n > 0; ++h) {
      const Copy& last = items[n - 1];
      first += at[int64_t{h + 1} * n - 1] + (last.peer >= 0 && last.hop == h ? 1 : 0);
    }
    return static_cast<int32_t>(first);
  };
  team.ForEach(kMaxHops + 1, [&](int32_t hop) { begin[hop] = first_of(hop); });
  team.ForEach(n, [&](int32_t i) {
    const Copy copy = items[i];
    if (copy.peer < 0) return;
    list[first_of(copy.hop) + at[int64_t{copy.hop} * n + i]] = copy;
    team.Add(&count[copy.hop * schedule.num_ranks + copy.peer], int32_t{1});
  });
}

// Fills `schedule` for slot_expert [R, N], as problem.cost.pulls says: 8 dependent steps, and 12 more for the best of
// all modes. Ends without a barrier.
template <class Team>
TOPOEP_BODY void MakePullSchedule(Team& team, const Problem& problem, const Domains& domains,
                                  const int32_t* slot_expert, const PullSchedule& schedule) {
  Pulls mode = problem.cost.pulls;
  if (mode == Pulls::kBest) {
    const PullCounts counts(problem, schedule.words);
    const Links links(problem, schedule.words + PullCounts::NumWords(problem), schedule.bests);
    PullPs(team, problem, domains, slot_expert, counts, links, mode);
  }
  team.ForEach(problem.num_experts, [&](int32_t expert) { schedule.holders[expert] = 0; });
  team.ForEach(kMaxHops * problem.num_ranks, [&](int32_t i) {
    schedule.receives[i] = 0;
    schedule.sends[i] = 0;
  });
  team.ForEach(problem.num_slots, [&](int32_t slot) {
    schedule.held[slot] = slot_expert[int64_t{schedule.rank} * problem.num_slots + slot];
  });
  team.Single([&] { *schedule.num_hops = mode == Pulls::kStriped ? 3 : mode == Pulls::kRelayed ? 2 : 1; });
  team.Sync();
  team.ForEach(problem.num_ranks * problem.num_slots, [&](int32_t i) {
    if (slot_expert[i] >= 0) team.Add(&schedule.holders[slot_expert[i]], int32_t{1});
  });
  team.Sync();
  team.ScanEach(
      1, problem.num_experts,
      [&](int32_t, int32_t ordinal) {
        const int32_t owner = domains.ranks[ordinal / problem.MainsPerRank()];
        const int32_t expert = owner * problem.MainsPerRank() + ordinal % problem.MainsPerRank();
        return schedule.holders[expert] > 0 ? 1 : 0;
      },
      schedule.stripe);
  const CopyRules rules(problem, domains, slot_expert, mode, schedule);
  ListCopies(
      team, schedule, schedule.NumIncoming(), [&](int32_t i) { return rules.Incoming(i); }, schedule.incoming,
      schedule.incoming_begin, schedule.receives);
  team.Sync();
  ListCopies(
      team, schedule, schedule.NumOutgoing(), [&](int32_t i) { return rules.Outgoing(i); }, schedule.outgoing,
      schedule.outgoing_begin, schedule.sends);
}

}  // namespace topoep
