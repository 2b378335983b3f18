#include "xla_ffi/plan/call.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "xla_ffi/plan/cost.h"

namespace topoep {
namespace {

namespace ffi = xla::ffi;

using Dimensions = ffi::Span<const int64_t>;

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kCandidateFields = 5;
constexpr int64_t kMaxSetting = int64_t{1} << 20;
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

std::string Text(Dimensions dimensions) {
  std::string text = "[";
  for (const int64_t dimension : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "]";
}

ffi::Error CheckShape(const char* name, Dimensions actual, std::initializer_list<int64_t> expected) {
  if (std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("topoep_plan: " + std::string(name) + " has shape " + Text(actual) +
                                     ", expected " + Text(Dimensions(expected.begin(), expected.size())));
}

ffi::Error CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("topoep_plan: " + std::string(name) + "=" + std::to_string(value) +
                                     " must be in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
}

// The first failure of a list, or success.
ffi::Error FirstOf(std::initializer_list<ffi::Error> errors) {
  const auto* failed = std::find_if(errors.begin(), errors.end(), [](const ffi::Error& e) { return e.failure(); });
  return failed == errors.end() ? ffi::Error::Success() : *failed;
}

ffi::Error CheckTopology(Dimensions omega, Int32Attribute domain_of_rank) {
  const int64_t num_ranks = static_cast<int64_t>(domain_of_rank.size());
  if (num_ranks == 0) return ffi::Error::InvalidArgument("topoep_plan: domain_of_rank is empty");
  if (omega.size() != 2 || omega[0] != num_ranks || omega[1] == 0 || omega[1] % num_ranks != 0) {
    return ffi::Error::InvalidArgument("topoep_plan: omega has shape " + Text(omega) + ", expected [" +
                                       std::to_string(num_ranks) + ", a multiple of it]");
  }
  const auto [lowest, highest] = std::minmax_element(domain_of_rank.begin(), domain_of_rank.end());
  return FirstOf({CheckRange("num_experts", omega[1], 1, kInt32Max),
                  CheckRange("lowest domain", *lowest, 0, num_ranks - 1),
                  CheckRange("highest domain", *highest, 0, num_ranks - 1)});
}

// The bounds of CostModel: no 64-bit sum overflows within them.
ffi::Error CheckCost(const CostModel& cost, int64_t num_ranks, int64_t num_speeds, int64_t instances) {
  const int64_t slowest_link = std::max({cost.inter_fs_per_byte, cost.intra_fs_per_byte, int64_t{1}});
  if (slowest_link > kInt64Max / (2 * kMaxRows)) {
    return CheckRange("fs_per_byte", slowest_link, 0, kInt64Max / (2 * kMaxRows));
  }
  if (num_speeds != 0 && num_speeds != num_ranks)
    return CheckRange("entries of rank_speed", num_speeds, num_ranks, num_ranks);
  int64_t slowest_rank = kNominalSpeed;
  for (int64_t r = 0; r < num_speeds; ++r) {
    const int64_t speed = cost.rank_speed[r];
    if (speed < 1 || speed > kMaxSpeed) return CheckRange("rank_speed", speed, 1, kMaxSpeed);
    slowest_rank = std::min(slowest_rank, speed);
  }
  if (cost.tile_rows < 0 || cost.tile_rows > kMaxRows) return CheckRange("tile_rows", cost.tile_rows, 0, kMaxRows);
  const bool by_instance = cost.instance_ps > 0 || cost.tile_rows > 0;
  const int64_t copies_per_replica = cost.pulls == Pulls::kDirect ? 1 : 2;
  return FirstOf({
      CheckRange("inter_fs_per_byte", cost.inter_fs_per_byte, 0, slowest_link),
      CheckRange("intra_fs_per_byte", cost.intra_fs_per_byte, 0, slowest_link),
      CheckRange("row_ps", cost.row_ps, 0, ComputeLimit(MaxPaddedRows(cost.tile_rows), slowest_rank)),
      CheckRange("instance_ps", cost.instance_ps, 0, ComputeLimit(kMaxInstances, slowest_rank)),
      CheckRange("instances of a rank", instances, 1, by_instance ? kMaxInstances : kInt32Max),
      CheckRange("token_bytes", cost.token_bytes, 1, kInt64Max / (2 * kMaxRows * slowest_link)),
      CheckRange("expert_bytes", cost.expert_bytes, 1, kInt64Max / (copies_per_replica * kMaxReplicas * slowest_link)),
      CheckRange("pulls", static_cast<int64_t>(cost.pulls), 0, static_cast<int64_t>(Pulls::kBest)),
  });
}

// The bounds keep products of a field and rows inside 64 bits.
ffi::Error CheckEffort(Planner planner, Int64Attribute candidates, Int32Attribute thrifty, Int32Attribute eager,
                       int64_t fill_moves, int64_t num_threads) {
  const int64_t num_fields = static_cast<int64_t>(candidates.size());
  const int64_t least = planner == Planner::kTopoep ? kCandidateFields : 0;
  if (num_fields % kCandidateFields != 0) return ffi::Error::InvalidArgument("topoep_plan: candidates are cut off");
  if (ffi::Error error = FirstOf({CheckRange("entries of candidates", num_fields, least, kCandidateFields << 16),
                                  CheckRange("fill_moves", fill_moves, 0, kMaxSetting),
                                  CheckRange("num_threads", num_threads, 1, 256)});
      error.failure()) {
    return error;
  }
  for (int64_t i = 0; i < num_fields; ++i) {
    const bool is_share = i % kCandidateFields == 2;
    const bool is_own = i % kCandidateFields == 0;
    if (ffi::Error error = CheckRange("a candidate's field", candidates[i], is_share ? 0 : -1,
                                      is_share ? 16
                                      : is_own ? kInt32Max
                                               : kMaxSetting);
        error.failure()) {
      return error;
    }
  }
  for (const auto& kinds : {thrifty, eager}) {
    for (const int32_t kind : kinds) {
      if (ffi::Error error = CheckRange("kind of a round", kind, 0, static_cast<int64_t>(Kind::kHome)); error.failure())
        return error;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

xla::ffi::Error PlanCall::Read(Int32s omega, Int32sResult slot_expert, Int32sResult quota, Int32sResult rank_load,
                               Int32sResult predicted_ps, Int32sResult status, BytesResult workspace,
                               Int32Attribute domain_of_rank, int64_t num_slots, int64_t planner, int64_t objective,
                               int64_t cap_rows, int64_t block_rows, int64_t expert_bytes, int64_t token_bytes,
                               int64_t row_ps, int64_t inter_fs_per_byte, int64_t intra_fs_per_byte,
                               int64_t instance_ps, int64_t tile_rows, Int32Attribute rank_speed, int64_t pulls,
                               Int64Attribute candidates, Int32Attribute thrifty, Int32Attribute eager,
                               int64_t fill_moves, bool paper, int64_t refine_changes, int64_t refine_starts,
                               int64_t refine_waves, int64_t num_threads) {
  const CostModel cost{expert_bytes,
                       token_bytes,
                       row_ps,
                       inter_fs_per_byte,
                       intra_fs_per_byte,
                       instance_ps,
                       tile_rows,
                       rank_speed.size() == 0 ? nullptr : rank_speed.begin(),
                       static_cast<Pulls>(pulls)};
  if (ffi::Error error = CheckTopology(omega.dimensions(), domain_of_rank); error.failure()) return error;
  const int64_t num_ranks = omega.dimensions()[0];
  const int64_t num_experts = omega.dimensions()[1];
  const int64_t mains = num_experts / num_ranks;
  if (ffi::Error error = FirstOf({
          CheckRange("num_slots", num_slots, 0, std::min(num_experts - mains, kMaxReplicas / num_ranks)),
          CheckRange("planner", planner, 0, static_cast<int64_t>(Planner::kTopoep)),
          CheckRange("objective", objective, 0, static_cast<int64_t>(Objective::kEq8)),
          CheckRange("refine_changes", refine_changes, 0, kMaxSetting),
          CheckRange("refine_starts", refine_starts, 0, kMaxSetting),
          CheckRange("refine_waves", refine_waves, 0, kMaxSetting),
          CheckRange("cap_rows", cap_rows, kNoCap, kInt64Max),
          CheckRange("block_rows", block_rows, 1, kInt32Max),
          CheckCost(cost, num_ranks, static_cast<int64_t>(rank_speed.size()), mains + num_slots),
          CheckShape("slot_expert", slot_expert->dimensions(), {num_ranks, num_slots}),
          CheckShape("quota", quota->dimensions(), {num_ranks, num_ranks, mains + num_slots}),
          CheckShape("rank_load", rank_load->dimensions(), {num_ranks}),
          CheckShape("predicted_ps", predicted_ps->dimensions(), {2}),
          CheckShape("status", status->dimensions(), {}),
      });
      error.failure()) {
    return error;
  }
  if (ffi::Error error =
          CheckEffort(static_cast<Planner>(planner), candidates, thrifty, eager, fill_moves, num_threads);
      error.failure()) {
    return error;
  }
  for (size_t i = 0; i + kCandidateFields <= candidates.size(); i += kCandidateFields) {
    const int64_t* fields = candidates.begin() + i;
    candidates_.push_back({fields[0], fields[1], fields[2], fields[3], fields[4]});
  }
  effort_ = {candidates_.data(),
             static_cast<int32_t>(candidates_.size()),
             thrifty.begin(),
             static_cast<int32_t>(thrifty.size()),
             eager.begin(),
             static_cast<int32_t>(eager.size()),
             static_cast<int32_t>(fill_moves),
             paper,
             refine_changes,
             static_cast<int32_t>(refine_starts),
             static_cast<int32_t>(refine_waves)};
  problem_ = {static_cast<int32_t>(num_ranks),
              static_cast<int32_t>(num_experts),
              static_cast<int32_t>(num_slots),
              1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end()),
              domain_of_rank.begin(),
              omega.typed_data(),
              cost,
              cap_rows,
              block_rows,
              static_cast<Planner>(planner),
              static_cast<Objective>(objective),
              &effort_,
              static_cast<int32_t>(num_threads)};
  plan_ = {slot_expert->typed_data(), quota->typed_data(), rank_load->typed_data(), predicted_ps->typed_data(),
           status->typed_data()};
  workspace_ = workspace->untyped_data();
  workspace_bytes_ = static_cast<int64_t>(workspace->size_bytes());
  return ffi::Error::Success();
}

}  // namespace topoep
