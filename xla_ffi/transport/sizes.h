// Bytes that a group needs on every rank, from what is known before any plan. On the host; no CUDA, no NCCL.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/transfer/pull_schedule.h"
#include "xla_ffi/transfer/push_schedule.h"
#include "xla_ffi/transfer/windows.h"

namespace topoep {

// Working memory beside the windows, of its own for each kind of call; the next of a kind follows in stream order.
enum Schedule : int32_t { kPullSchedule, kPushSchedule, kNumSchedules };

struct GroupSizes {
  std::array<int64_t, kNumWindows> windows{};
  std::array<int64_t, kNumSchedules> schedules{};
};

// A layer's replicas: what its pulls and pushes have to know beside the plan.
struct LayerShape {
  int32_t mains_per_rank;
  int32_t num_slots;
  int64_t expert_bytes;  // one expert's parameters
  Pulls pulls;
};

// The part of a planning problem that transfers use; it points to `domain_of_rank`.
inline Problem ProblemOf(const std::vector<int32_t>& domain_of_rank, const LayerShape& layer) {
  Problem problem{};
  problem.num_ranks = static_cast<int32_t>(domain_of_rank.size());
  problem.num_experts = layer.mains_per_rank * problem.num_ranks;
  problem.num_slots = layer.num_slots;
  problem.num_domains = 1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end());
  problem.domain_of_rank = domain_of_rank.data();
  problem.cost.expert_bytes = layer.expert_bytes;
  problem.cost.pulls = layer.pulls;
  return problem;
}

// domain_of_rank [R] is not empty and names every domain up to its largest.
inline GroupSizes SizesOf(const std::vector<int32_t>& domain_of_rank, const LayerShape& layer, int64_t staging_bytes,
                          int64_t bounce_bytes) {
  const Problem problem = ProblemOf(domain_of_rank, layer);
  const WindowShape shape = ShapeOf(problem, layer.expert_bytes, staging_bytes, bounce_bytes);
  GroupSizes sizes;
  sizes.windows = shape.Bytes();
  const DomainTable table(problem);
  Arena pull;
  PullSchedule(problem, table.View(), 0, layer.expert_bytes, pull);
  Arena push;
  PushSchedule(problem, 0, 0, shape.HalfBytes(), push);
  sizes.schedules = {pull.Used(), push.Used()};
  return sizes;
}

}  // namespace topoep
