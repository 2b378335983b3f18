// Bytes between ranks by class of link, and their time; topoep_jax/plan/links.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// Picoseconds to move `bytes` at `fs_per_byte`; the one rounding rule, applied once per term.
TOPOEP_BODY inline int64_t LinkPs(int64_t bytes, int64_t fs_per_byte) { return bytes * fs_per_byte / 1000; }

// The sum of both classes of link, each rounded once.
TOPOEP_BODY inline int64_t LinksPs(const CostModel& cost, int64_t inter_bytes, int64_t intra_bytes) {
  return LinkPs(inter_bytes, cost.inter_fs_per_byte) + LinkPs(intra_bytes, cost.intra_fs_per_byte);
}

// Bytes that each rank sends and receives. It only views its words; a barrier must lie between Clear() and the first
// addition, and between the last addition and BusiestPs() or TotalPs().
class Links {
 public:
  enum Class : int32_t { kInter = 0, kIntra = 1 };

  // Words and Bests of working memory.
  TOPOEP_BODY static int64_t NumWords(int32_t num_ranks) { return 4 * int64_t{num_ranks}; }
  static constexpr int32_t kNumBests = 2;

  TOPOEP_BODY Links(const Problem& problem, int64_t* words, Best* bests)
      : cost_(&problem.cost),
        domain_of_rank_(problem.domain_of_rank),
        num_ranks_(problem.num_ranks),
        words_(words),
        bests_(bests) {}

  template <class Team>
  TOPOEP_BODY void Clear(Team& team) const {
    team.ForEach(4 * num_ranks_, [this](int32_t i) { words_[i] = 0; });
  }

  // What stays on a rank costs nothing.
  template <class Team>
  TOPOEP_BODY void Add(Team& team, int32_t from, int32_t to, int64_t bytes) const {
    if (from == to) return;
    const Class link = domain_of_rank_[from] == domain_of_rank_[to] ? kIntra : kInter;
    AddSent(team, link, from, bytes);
    AddReceived(team, link, to, bytes);
  }

  template <class Team>
  TOPOEP_BODY void AddSent(Team& team, Class link, int32_t rank, int64_t bytes) const {
    team.Add(&words_[2 * link * num_ranks_ + rank], bytes);
  }

  template <class Team>
  TOPOEP_BODY void AddReceived(Team& team, Class link, int32_t rank, int64_t bytes) const {
    team.Add(&words_[(2 * link + 1) * num_ranks_ + rank], bytes);
  }

  // The busiest rank of each class, in or out; one dependent step.
  template <class Team>
  TOPOEP_BODY int64_t BusiestPs(Team& team) const {
    team.ArgMaxEach(
        2, 2 * num_ranks_, [this](int32_t link, int32_t i) { return words_[2 * link * num_ranks_ + i]; },
        [this](int32_t link, Best best) { bests_[link] = best; });
    return LinksPs(*cost_, bests_[kInter].key, bests_[kIntra].key);
  }

  // All ranks together; every lane adds for itself.
  TOPOEP_BODY int64_t TotalPs() const {
    int64_t bytes[2] = {0, 0};
    for (int32_t link = 0; link < 2; ++link) {
      for (int32_t r = 0; r < num_ranks_; ++r) bytes[link] += words_[2 * link * num_ranks_ + r];
    }
    return LinksPs(*cost_, bytes[kInter], bytes[kIntra]);
  }

  template <class Team>
  TOPOEP_BODY int64_t Ps(Team& team, Objective objective) const {
    return objective == Objective::kEq8 ? TotalPs() : BusiestPs(team);
  }

 private:
  const CostModel* cost_;
  const int32_t* domain_of_rank_;
  int32_t num_ranks_;
  int64_t* words_;  // [class][sent, received][R]
  Best* bests_;     // [class]
};

}  // namespace topoep
