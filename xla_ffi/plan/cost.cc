#include "xla_ffi/plan/cost.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace topoep {
namespace {

// Counts of one kind (rows or pulls) over one class of link, by rank that sends and rank that receives.
class LinkCounts {
 public:
  explicit LinkCounts(int32_t num_ranks) : out_(num_ranks), in_(num_ranks) {}

  void Add(int32_t from, int32_t to, int64_t count) {
    out_[from] += count;
    in_[to] += count;
    total_ += count;
  }

  int64_t Reduce(Objective objective) const {
    if (objective == Objective::kEq8) return total_;
    return std::max(*std::max_element(out_.begin(), out_.end()), *std::max_element(in_.begin(), in_.end()));
  }

 private:
  std::vector<int64_t> out_;
  std::vector<int64_t> in_;
  int64_t total_ = 0;
};

// Both classes of link; what stays on a rank costs nothing.
class Traffic {
 public:
  explicit Traffic(const Problem& problem)
      : domain_of_rank_(problem.domain_of_rank), inter_(problem.num_ranks), intra_(problem.num_ranks) {}

  void Add(int32_t from, int32_t to, int64_t count) {
    if (from == to) return;
    (domain_of_rank_[from] == domain_of_rank_[to] ? intra_ : inter_).Add(from, to, count);
  }

  int64_t Ps(const Problem& problem, int64_t bytes) const {
    return LinkPs(bytes * inter_.Reduce(problem.objective), problem.cost.inter_fs_per_byte) +
           LinkPs(bytes * intra_.Reduce(problem.objective), problem.cost.intra_fs_per_byte);
  }

 private:
  const int32_t* domain_of_rank_;
  LinkCounts inter_;
  LinkCounts intra_;
};

}  // namespace

int64_t PredictPs(const Problem& problem, const int32_t* slot_expert, const int32_t* quota) {
  Traffic rows(problem);
  Traffic pulls(problem);
  std::vector<int64_t> load(problem.num_ranks);
  for (int32_t source = 0; source < problem.num_ranks; ++source) {
    for (int32_t rank = 0; rank < problem.num_ranks; ++rank) {
      int64_t count = 0;
      for (int32_t j = 0; j < problem.InstancesPerRank(); ++j) count += quota[problem.QuotaAt(source, rank, j)];
      rows.Add(source, rank, count);
      load[rank] += count;
    }
  }
  for (int32_t rank = 0; rank < problem.num_ranks; ++rank) {
    for (int32_t slot = 0; slot < problem.num_slots; ++slot) {
      const int32_t expert = slot_expert[int64_t{rank} * problem.num_slots + slot];
      if (expert >= 0) pulls.Add(problem.MainRank(expert), rank, 1);
    }
  }
  const int64_t compute_ps = problem.cost.row_ps * *std::max_element(load.begin(), load.end());
  return compute_ps + rows.Ps(problem, 2 * problem.cost.token_bytes) + pulls.Ps(problem, problem.cost.expert_bytes);
}

}  // namespace topoep
