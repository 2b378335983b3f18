#include "xla_ffi/plan/finish.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "xla_ffi/plan/cost.h"

namespace topoep {
namespace {

bool HasRows(const Problem& problem, const int32_t* quota, int32_t rank, int32_t instance) {
  for (int32_t source = 0; source < problem.num_ranks; ++source) {
    if (quota[problem.QuotaAt(source, rank, instance)] > 0) return true;
  }
  return false;
}

// Rewrites the slots of one rank, keeping only replicas with rows, in ascending expert id; quotas move along.
void SortSlotsOf(const Problem& problem, const Plan& plan, int32_t rank, std::vector<int32_t>& order,
                 std::vector<int32_t>& row) {
  const int32_t mains = problem.MainsPerRank();
  int32_t* experts = plan.slot_expert + int64_t{rank} * problem.num_slots;
  order.clear();
  for (int32_t slot = 0; slot < problem.num_slots; ++slot) {
    if (experts[slot] >= 0 && HasRows(problem, plan.quota, rank, mains + slot)) order.push_back(slot);
  }
  std::sort(order.begin(), order.end(), [experts](int32_t a, int32_t b) { return experts[a] < experts[b]; });

  const auto permute = [&](int32_t* values, int32_t empty) {
    row.assign(problem.num_slots, empty);
    for (size_t i = 0; i < order.size(); ++i) row[i] = values[order[i]];
    std::copy(row.begin(), row.end(), values);
  };
  permute(experts, -1);
  for (int32_t source = 0; source < problem.num_ranks; ++source) {
    permute(plan.quota + problem.QuotaAt(source, rank, mains), 0);
  }
}

bool MeetsCap(const Problem& problem, const int32_t* quota) {
  if (problem.cap_rows == kNoCap) return true;
  for (int32_t rank = 0; rank < problem.num_ranks; ++rank) {
    int64_t aligned = 0;
    for (int32_t instance = 0; instance < problem.InstancesPerRank(); ++instance) {
      int64_t rows = 0;
      for (int32_t source = 0; source < problem.num_ranks; ++source) {
        rows += quota[problem.QuotaAt(source, rank, instance)];
      }
      const int64_t partial = rows % problem.block_rows;
      aligned += partial == 0 ? rows : rows - partial + problem.block_rows;
    }
    if (aligned > problem.cap_rows) return false;
  }
  return true;
}

bool IsOverEmptyCost(const Problem& problem, int64_t predicted_ps) {
  std::vector<int32_t> slot_expert(int64_t{problem.num_ranks} * problem.num_slots);
  std::vector<int32_t> quota(problem.NumQuotas());
  const Plan empty{slot_expert.data(), quota.data(), nullptr, nullptr, nullptr};
  EmptyPlan(problem, empty);
  return MeetsCap(problem, empty.quota) && predicted_ps > PredictPs(problem, empty.slot_expert, empty.quota);
}

}  // namespace

void EmptyPlan(const Problem& problem, const Plan& plan) {
  const int32_t mains = problem.MainsPerRank();
  std::fill_n(plan.slot_expert, int64_t{problem.num_ranks} * problem.num_slots, -1);
  std::fill_n(plan.quota, problem.NumQuotas(), 0);
  for (int32_t source = 0; source < problem.num_ranks; ++source) {
    const int32_t* demand = problem.omega + int64_t{source} * problem.num_experts;
    for (int32_t rank = 0; rank < problem.num_ranks; ++rank) {
      std::copy_n(demand + int64_t{rank} * mains, mains, plan.quota + problem.QuotaAt(source, rank, 0));
    }
  }
}

void SortSlots(const Problem& problem, const Plan& plan) {
  std::vector<int32_t> order;
  std::vector<int32_t> row;
  for (int32_t rank = 0; rank < problem.num_ranks; ++rank) SortSlotsOf(problem, plan, rank, order, row);
}

void Finish(const Problem& problem, const Plan& plan) {
  SortSlots(problem, plan);

  std::fill_n(plan.rank_load, problem.num_ranks, 0);
  const int32_t* quota = plan.quota;
  for (int32_t source = 0; source < problem.num_ranks; ++source) {
    for (int32_t rank = 0; rank < problem.num_ranks; ++rank) {
      for (int32_t j = 0; j < problem.InstancesPerRank(); ++j) plan.rank_load[rank] += *quota++;
    }
  }

  const int64_t predicted_ps = PredictPs(problem, plan.slot_expert, plan.quota);
  plan.predicted_ps[0] = static_cast<int32_t>(predicted_ps >> 32);
  plan.predicted_ps[1] = static_cast<int32_t>(static_cast<uint32_t>(predicted_ps));

  const int32_t* slots_end = plan.slot_expert + int64_t{problem.num_ranks} * problem.num_slots;
  const bool is_empty = std::all_of(plan.slot_expert, const_cast<int32_t*>(slots_end), [](int32_t e) { return e < 0; });
  int32_t status = 0;
  if (MeetsCap(problem, plan.quota)) status |= kCapMet;
  if (is_empty) status |= kEmpty;
  if (IsOverEmptyCost(problem, predicted_ps)) status |= kOverEmptyCost;
  *plan.status = status;
}

}  // namespace topoep
