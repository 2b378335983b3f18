// What the pulls of a plan cost, without a list of copies; topoep_jax/plan/pulls.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/links.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// Working memory of the pulls, in words; `words` are split in this order.
class PullCounts {
 public:
  TOPOEP_BODY static int64_t NumWords(const Problem& problem) {
    return int64_t{problem.num_experts} + 2 * int64_t{problem.num_ranks} + 3 * int64_t{problem.num_domains};
  }

  TOPOEP_BODY PullCounts(const Problem& problem, int64_t* words)
      : holders(words),
        intra(holders + problem.num_experts),
        owned(intra + problem.num_ranks),
        intra_of_domain(owned + problem.num_ranks),
        inter_of_domain(intra_of_domain + problem.num_domains),
        owned_of_domain(inter_of_domain + problem.num_domains) {}

  int64_t* holders;          // [E] replicas of an expert
  int64_t* intra;            // [R] replicas on a rank whose main is in its domain
  int64_t* owned;            // [R] replicated experts whose main is on the rank
  int64_t* intra_of_domain;  // [M] replicas in the domain of mains there
  int64_t* inter_of_domain;  // [M] first holders, in other domains, of experts whose main is here
  int64_t* owned_of_domain;  // [M] replicated experts whose main is in the domain
};

// The lowest rank of `rank`'s domain with a replica of the expert, which `rank` has.
TOPOEP_BODY inline int32_t FirstHolder(const Problem& problem, const Domains& domains, const int32_t* slot_expert,
                                       int32_t rank, int32_t expert) {
  const int32_t domain = problem.domain_of_rank[rank];
  for (int32_t at = 0; at < domains.position[rank]; ++at) {
    const int32_t other = domains.Rank(domain, at);
    for (int32_t slot = 0; slot < problem.num_slots; ++slot) {
      if (slot_expert[int64_t{other} * problem.num_slots + slot] == expert) return other;
    }
  }
  return rank;
}

// Adds whole copies; `relay` lets one of them cross to a domain and the others there follow from it.
template <class Team>
TOPOEP_STAGE void AddWholePulls(Team& team, const Problem& problem, const Domains& domains, const int32_t* slot_expert,
                                bool relay, const Links& links) {
  team.ForEach(problem.num_ranks * problem.num_slots, [&](int32_t i) {
    const int32_t expert = slot_expert[i];
    if (expert < 0) return;
    const int32_t rank = i / problem.num_slots;
    int32_t source = problem.MainRank(expert);
    if (relay && problem.domain_of_rank[source] != problem.domain_of_rank[rank]) {
      const int32_t first = FirstHolder(problem, domains, slot_expert, rank, expert);
      if (first != rank) source = first;
    }
    links.Add(team, source, rank, problem.cost.expert_bytes);
  });
}

// Adds striped copies. Who sends a slice depends on the domain of the main alone, so counts by domain are enough.
template <class Team>
TOPOEP_STAGE void AddStripedPulls(Team& team, const Problem& problem, const Domains& domains,
                                  const int32_t* slot_expert, const PullCounts& counts, const Links& links) {
  const int64_t bytes = problem.cost.expert_bytes;
  team.ForEach(static_cast<int32_t>(PullCounts::NumWords(problem)), [&](int32_t i) { counts.holders[i] = 0; });
  team.Sync();
  team.ForEach(problem.num_ranks * problem.num_slots, [&](int32_t i) {
    const int32_t expert = slot_expert[i];
    if (expert < 0) return;
    const int32_t rank = i / problem.num_slots;
    const int32_t home = problem.DomainOfExpert(expert);
    team.Add(&counts.holders[expert], int64_t{1});
    if (home == problem.domain_of_rank[rank]) {
      team.Add(&counts.intra[rank], int64_t{1});
      team.Add(&counts.intra_of_domain[home], int64_t{1});
      return;
    }
    const int32_t first = FirstHolder(problem, domains, slot_expert, rank, expert);
    if (first == rank) {
      team.Add(&counts.inter_of_domain[home], int64_t{1});
      links.AddReceived(team, Links::kInter, rank, bytes);
    } else {
      links.Add(team, first, rank, bytes);
    }
  });
  team.Sync();
  team.ForEach(problem.num_experts, [&](int32_t expert) {
    if (counts.holders[expert] == 0) return;
    team.Add(&counts.owned[problem.MainRank(expert)], int64_t{1});
    team.Add(&counts.owned_of_domain[problem.DomainOfExpert(expert)], int64_t{1});
  });
  team.Sync();
  team.ForEach(problem.num_ranks, [&](int32_t rank) {
    const int32_t home = problem.domain_of_rank[rank];
    const int64_t at = domains.position[rank];
    const int64_t size = domains.Size(home);
    const int64_t slice = bytes * (at + 1) / size - bytes * at / size;
    // The owner spreads its experts; then this rank's slice goes to holders there and to the first ones elsewhere.
    const int64_t sent_intra = counts.intra_of_domain[home] - counts.intra[rank];
    const int64_t received = counts.owned_of_domain[home] - counts.owned[rank];
    links.AddSent(team, Links::kIntra, rank, counts.owned[rank] * (bytes - slice) + slice * sent_intra);
    links.AddReceived(team, Links::kIntra, rank, counts.intra[rank] * (bytes - slice) + slice * received);
    links.AddSent(team, Links::kInter, rank, slice * counts.inter_of_domain[home]);
  });
}

// Fills `links` with the bytes of one mode, which is not kBest; 2 dependent steps, 5 if striped.
template <class Team>
TOPOEP_BODY void CountPulls(Team& team, const Problem& problem, const Domains& domains, const int32_t* slot_expert,
                            Pulls mode, const PullCounts& counts, const Links& links) {
  links.Clear(team);
  team.Sync();
  if (mode == Pulls::kStriped) {
    AddStripedPulls(team, problem, domains, slot_expert, counts, links);
  } else {
    AddWholePulls(team, problem, domains, slot_expert, mode == Pulls::kRelayed, links);
  }
  team.Sync();
}

// Picoseconds of the pulls of slot_expert [R, N] under problem.objective, in the mode that problem.cost.pulls says,
// which is left in `chosen`: 3 dependent steps, 6 if striped; for the best of all modes 12, and 15 under Eq. 8.
template <class Team>
TOPOEP_BODY int64_t PullPs(Team& team, const Problem& problem, const Domains& domains, const int32_t* slot_expert,
                           const PullCounts& counts, const Links& links, Pulls& chosen) {
  const bool any = problem.cost.pulls == Pulls::kBest;
  int64_t quickest = 0;
  int64_t result = 0;
  for (int64_t id = 0; id < static_cast<int64_t>(Pulls::kBest); ++id) {
    const Pulls mode = static_cast<Pulls>(id);
    if (!any && mode != problem.cost.pulls) continue;
    CountPulls(team, problem, domains, slot_expert, mode, counts, links);
    if (!any) {
      const int64_t ps = links.Ps(team, problem.objective);
      team.Sync();  // Eq. 8 adds up what other lanes may clear for the next plan
      chosen = mode;
      return ps;
    }
    // The schedule is the quickest one under either objective; the first of them on a tie.
    const int64_t ps = links.BusiestPs(team);
    if (mode == Pulls::kDirect || ps < quickest) {
      quickest = ps;
      result = problem.objective == Objective::kEq8 ? links.TotalPs() : ps;
      chosen = mode;
    }
    if (problem.objective == Objective::kEq8) team.Sync();
  }
  return result;
}

}  // namespace topoep
