#include "xla_ffi/plan/paper.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <tuple>
#include <vector>

namespace topoep {
namespace {

constexpr int32_t kNotHeld = -1;

// The plan under construction. Replicas stand in their slots in order of placement, quotas in the caller's memory.
class Draft {
 public:
  Draft(const Problem& problem, const Plan& plan);

  void PlaceRemoteExperts(int32_t domain);  // stage 1
  void SplitEvenly();
  void CountLoads();
  bool ShedHalfGap(int32_t domain);  // stage 2, one move; false when the domain is finished

 private:
  struct Move {
    int64_t amount;
    int32_t target;
    int32_t expert;
    int32_t instance;  // on the busiest rank
  };

  int32_t InstanceOf(int32_t rank, int32_t expert) const {
    return instance_of_[int64_t{rank} * problem_.num_experts + expert];
  }
  int32_t ExpertOf(int32_t rank, int32_t instance) const;
  int32_t Place(int32_t rank, int32_t expert);
  int32_t RankWithFewestSlots(int32_t domain) const;
  void SplitRows(int32_t source, int32_t expert, const std::vector<int32_t>& holders);
  int32_t BusiestRank(int32_t domain) const;
  bool FindMove(int32_t domain, int32_t busiest, Move* best) const;
  void Apply(int32_t busiest, const Move& move);
  int64_t& LoadOf(int32_t rank, int32_t instance) {
    return instance_load_[int64_t{rank} * problem_.InstancesPerRank() + instance];
  }

  const Problem& problem_;
  const Plan& plan_;
  std::vector<std::vector<int32_t>> ranks_of_domain_;
  std::vector<int32_t> instance_of_;    // [R, E], kNotHeld where the rank has no instance
  std::vector<int32_t> used_slots_;     // [R]; a slot that lost its rows stays used
  std::vector<int64_t> instance_load_;  // [R, J]
  std::vector<int64_t> rank_load_;      // [R]
};

Draft::Draft(const Problem& problem, const Plan& plan)
    : problem_(problem),
      plan_(plan),
      ranks_of_domain_(problem.num_domains),
      instance_of_(int64_t{problem.num_ranks} * problem.num_experts, kNotHeld),
      used_slots_(problem.num_ranks),
      instance_load_(int64_t{problem.num_ranks} * problem.InstancesPerRank()),
      rank_load_(problem.num_ranks) {
  const int32_t mains = problem.MainsPerRank();
  for (int32_t rank = 0; rank < problem.num_ranks; ++rank) {
    ranks_of_domain_[problem.domain_of_rank[rank]].push_back(rank);
    for (int32_t j = 0; j < mains; ++j) {
      instance_of_[int64_t{rank} * problem.num_experts + int64_t{rank} * mains + j] = j;
    }
  }
  std::fill_n(plan.slot_expert, int64_t{problem.num_ranks} * problem.num_slots, -1);
  std::fill_n(plan.quota, problem.NumQuotas(), 0);
}

int32_t Draft::ExpertOf(int32_t rank, int32_t instance) const {
  const int32_t mains = problem_.MainsPerRank();
  if (instance < mains) return rank * mains + instance;
  return plan_.slot_expert[int64_t{rank} * problem_.num_slots + instance - mains];
}

int32_t Draft::Place(int32_t rank, int32_t expert) {
  const int32_t slot = used_slots_[rank]++;
  const int32_t instance = problem_.MainsPerRank() + slot;
  plan_.slot_expert[int64_t{rank} * problem_.num_slots + slot] = expert;
  instance_of_[int64_t{rank} * problem_.num_experts + expert] = instance;
  return instance;
}

// The rank of `domain` with a free slot and the fewest used ones, or -1.
int32_t Draft::RankWithFewestSlots(int32_t domain) const {
  int32_t best = -1;
  for (const int32_t rank : ranks_of_domain_[domain]) {
    if (used_slots_[rank] == problem_.num_slots) continue;
    if (best < 0 || used_slots_[rank] < used_slots_[best]) best = rank;
  }
  return best;
}

void Draft::PlaceRemoteExperts(int32_t domain) {
  std::vector<int64_t> demand(problem_.num_experts);
  for (const int32_t rank : ranks_of_domain_[domain]) {
    const int32_t* row = problem_.omega + int64_t{rank} * problem_.num_experts;
    for (int32_t e = 0; e < problem_.num_experts; ++e) demand[e] += row[e];
  }
  std::vector<int32_t> candidates;
  for (int32_t e = 0; e < problem_.num_experts; ++e) {
    const bool pays = 2 * demand[e] * problem_.cost.token_bytes > problem_.cost.expert_bytes;
    if (pays && problem_.DomainOfExpert(e) != domain) candidates.push_back(e);
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&demand](int32_t a, int32_t b) { return demand[a] > demand[b]; });
  for (const int32_t expert : candidates) {
    const int32_t rank = RankWithFewestSlots(domain);
    if (rank < 0) return;
    Place(rank, expert);
  }
}

// Source rows of one expert over its holders; the remainder starts at a different holder for each source.
void Draft::SplitRows(int32_t source, int32_t expert, const std::vector<int32_t>& holders) {
  const int32_t rows = problem_.omega[int64_t{source} * problem_.num_experts + expert];
  const int32_t count = static_cast<int32_t>(holders.size());
  const int32_t base = rows / count;
  const int32_t remainder = rows % count;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t turn = ((i - source) % count + count) % count;
    const int32_t rank = holders[i];
    plan_.quota[problem_.QuotaAt(source, rank, InstanceOf(rank, expert))] = base + (turn < remainder ? 1 : 0);
  }
}

void Draft::SplitEvenly() {
  std::vector<int32_t> all;
  std::vector<int32_t> nearby;
  for (int32_t expert = 0; expert < problem_.num_experts; ++expert) {
    all.clear();
    for (int32_t rank = 0; rank < problem_.num_ranks; ++rank) {
      if (InstanceOf(rank, expert) != kNotHeld) all.push_back(rank);
    }
    for (int32_t domain = 0; domain < problem_.num_domains; ++domain) {
      nearby.clear();
      std::copy_if(all.begin(), all.end(), std::back_inserter(nearby),
                   [&](int32_t rank) { return problem_.domain_of_rank[rank] == domain; });
      const std::vector<int32_t>& holders = nearby.empty() ? all : nearby;
      for (const int32_t source : ranks_of_domain_[domain]) SplitRows(source, expert, holders);
    }
  }
}

void Draft::CountLoads() {
  const int32_t* quota = plan_.quota;
  for (int32_t source = 0; source < problem_.num_ranks; ++source) {
    for (int64_t& load : instance_load_) load += *quota++;
  }
  for (int32_t rank = 0; rank < problem_.num_ranks; ++rank) {
    for (int32_t j = 0; j < problem_.InstancesPerRank(); ++j) rank_load_[rank] += LoadOf(rank, j);
  }
}

int32_t Draft::BusiestRank(int32_t domain) const {
  int32_t busiest = ranks_of_domain_[domain].front();
  for (const int32_t rank : ranks_of_domain_[domain]) {
    if (rank_load_[rank] > rank_load_[busiest]) busiest = rank;
  }
  return busiest;
}

// The move with the smallest (-amount, load of target, pull, target, expert); false if there is none.
bool Draft::FindMove(int32_t domain, int32_t busiest, Move* best) const {
  using Key = std::tuple<int64_t, int64_t, int32_t, int32_t, int32_t>;
  const int32_t instances = problem_.InstancesPerRank();
  bool found = false;
  Key best_key;
  for (const int32_t target : ranks_of_domain_[domain]) {
    const int64_t half = (rank_load_[busiest] - rank_load_[target]) / 2;
    if (half == 0) continue;
    for (int32_t j = 0; j < instances; ++j) {
      const int64_t amount = std::min(instance_load_[int64_t{busiest} * instances + j], half);
      if (amount == 0) continue;
      const int32_t expert = ExpertOf(busiest, j);
      const bool held = InstanceOf(target, expert) != kNotHeld;
      if (!held && used_slots_[target] == problem_.num_slots) continue;
      const int32_t pull = held ? 0 : problem_.DomainOfExpert(expert) == domain ? 1 : 2;
      const Key key{-amount, rank_load_[target], pull, target, expert};
      if (found && key >= best_key) continue;
      found = true;
      best_key = key;
      *best = Move{amount, target, expert, j};
    }
  }
  return found;
}

// Takes the rows from the busiest rank's sources in ascending order.
void Draft::Apply(int32_t busiest, const Move& move) {
  int32_t instance = InstanceOf(move.target, move.expert);
  if (instance == kNotHeld) instance = Place(move.target, move.expert);
  int64_t left = move.amount;
  for (int32_t source = 0; left > 0; ++source) {
    int32_t& from = plan_.quota[problem_.QuotaAt(source, busiest, move.instance)];
    const int32_t taken = static_cast<int32_t>(std::min<int64_t>(from, left));
    from -= taken;
    plan_.quota[problem_.QuotaAt(source, move.target, instance)] += taken;
    left -= taken;
  }
  LoadOf(busiest, move.instance) -= move.amount;
  LoadOf(move.target, instance) += move.amount;
  rank_load_[busiest] -= move.amount;
  rank_load_[move.target] += move.amount;
}

bool Draft::ShedHalfGap(int32_t domain) {
  if (ranks_of_domain_[domain].empty()) return false;
  const int32_t busiest = BusiestRank(domain);
  Move move;
  if (!FindMove(domain, busiest, &move)) return false;
  Apply(busiest, move);
  return true;
}

}  // namespace

void PaperPlan(const Problem& problem, const Plan& plan) {
  Draft draft(problem, plan);
  for (int32_t domain = 0; domain < problem.num_domains; ++domain) draft.PlaceRemoteExperts(domain);
  draft.SplitEvenly();
  draft.CountLoads();
  for (int32_t domain = 0; domain < problem.num_domains; ++domain) {
    while (draft.ShedHalfGap(domain)) {
    }
  }
}

}  // namespace topoep
