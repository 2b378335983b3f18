// The Python extension topoep_jax._xla_ffi: hands XLA's handlers to Python as capsules.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/owned_problem.h"
#include "xla_ffi/plan/plan_cuda.h"
#include "xla_ffi/plan/topoep/depth.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/transport/sizes.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepPlan);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepHostPull);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepHostPush);

namespace {

// For tests/plan_depth_test.py, which passes what it took from the same tables as the planner's own call. Steps and
// items of the path, then of the paper's plan.
std::array<int64_t, 4> TopoepDepth(const std::vector<int32_t>& omega, const std::vector<int32_t>& domain_of_rank,
                                   int32_t num_slots, const std::array<int64_t, 5>& cost, int64_t cap_rows,
                                   const std::vector<std::array<int64_t, 5>>& candidates,
                                   const std::vector<int32_t>& thrifty, const std::vector<int32_t>& eager,
                                   int32_t fill_moves, bool paper, int32_t threads) {
  std::vector<topoep::Candidate> settings;
  for (const auto& c : candidates) settings.push_back({c[0], c[1], c[2], c[3], c[4]});
  topoep::Problem problem{};
  topoep::Effort& effort = problem.effort;
  effort.candidates = settings.data();
  effort.num_candidates = static_cast<int32_t>(settings.size());
  effort.thrifty = thrifty.data();
  effort.num_thrifty = static_cast<int32_t>(thrifty.size());
  effort.eager = eager.data();
  effort.num_eager = static_cast<int32_t>(eager.size());
  effort.fill_moves = fill_moves;
  effort.paper = paper;
  problem.num_ranks = static_cast<int32_t>(domain_of_rank.size());
  problem.num_experts = static_cast<int32_t>(omega.size() / domain_of_rank.size());
  problem.num_slots = num_slots;
  problem.num_domains = 1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end());
  problem.domain_of_rank = domain_of_rank.data();
  problem.omega = omega.data();
  problem.cost = {cost[0], cost[1], cost[2], cost[3], cost[4]};
  problem.cap_rows = cap_rows;
  problem.block_rows = 1;
  problem.planner = topoep::Planner::kTopoep;
  const topoep::Depth depth = topoep::PlanDepth(problem, threads);
  return {depth.path.steps, depth.path.items, depth.paper.steps, depth.paper.items};
}

// Bytes of the workspace of a call with these attributes; 0 where they are wrong, which the handler tells.
int64_t PlanWorkspace(const topoep::Attributes& attributes) {
  topoep::OwnedProblem problem;
  return topoep::ReadProblem(attributes, problem).empty() ? topoep::PlanScratchBytes(problem.View()) : 0;
}

// Bytes of every window of a group, then of every workspace, for topoep_jax/transport.
std::vector<int64_t> GroupSizes(const std::vector<int32_t>& domain_of_rank, int32_t mains_per_rank, int32_t num_slots,
                                int64_t expert_bytes, int64_t pulls, int64_t staging_bytes, int64_t bounce_bytes) {
  const topoep::LayerShape layer{mains_per_rank, num_slots, expert_bytes, static_cast<topoep::Pulls>(pulls)};
  const topoep::GroupSizes sizes = topoep::SizesOf(domain_of_rank, layer, staging_bytes, bounce_bytes);
  std::vector<int64_t> bytes(sizes.windows.begin(), sizes.windows.end());
  bytes.insert(bytes.end(), sizes.schedules.begin(), sizes.schedules.end());
  return bytes;
}

}  // namespace

PYBIND11_MODULE(_xla_ffi, module) {
  module.doc() = "XLA FFI handlers of topoep_jax; topoep_jax/_native.py registers and wraps them.";
  module.def(
      "registrations",
      [] {
        pybind11::dict handlers;
        handlers["topoep_plan"] = pybind11::capsule(reinterpret_cast<void*>(TopoepPlan));
        handlers["topoep_host_pull"] = pybind11::capsule(reinterpret_cast<void*>(TopoepHostPull));
        handlers["topoep_host_push"] = pybind11::capsule(reinterpret_cast<void*>(TopoepHostPush));
        return handlers;
      },
      "Name of each FFI target -> capsule of its handler.");
  module.def("topoep_depth", &TopoepDepth, "Dependent steps of planner topoep, and the most items of a thread in one.");
  module.def("plan_workspace", &PlanWorkspace, "Bytes of working memory that a call of the planner holds ready.");
  module.def("group_sizes", &GroupSizes, "Bytes of every window of a transport's group, then of its workspaces.");
}
