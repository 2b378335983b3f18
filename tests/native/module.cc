// The Python extension _topoep_tests, which only tests load: the wheel does not hold it.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "tests/native/depth.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/topoep/effort.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepHostPull);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepHostPush);

namespace {

// The caller takes what it passes from the same tables as the planner's own call. Steps and items of the path, then of
// the paper's plan.
std::array<int64_t, 4> TopoepDepth(const std::vector<int32_t>& omega, const std::vector<int32_t>& domain_of_rank,
                                   int32_t num_slots, const std::array<int64_t, 5>& cost, int64_t cap_rows,
                                   const std::vector<std::array<int64_t, 5>>& candidates,
                                   const std::vector<int32_t>& thrifty, const std::vector<int32_t>& eager,
                                   int32_t fill_moves, bool paper, int32_t threads) {
  std::vector<topoep::Candidate> settings;
  settings.reserve(candidates.size());
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

}  // namespace

PYBIND11_MODULE(_topoep_tests, module) {
  module.doc() = "What tests run beside the product: transfers on host threads, and a count of the planner's steps.";
  module.def(
      "registrations",
      [] {
        pybind11::dict handlers;
        handlers["topoep_host_pull"] = pybind11::capsule(reinterpret_cast<void*>(TopoepHostPull));
        handlers["topoep_host_push"] = pybind11::capsule(reinterpret_cast<void*>(TopoepHostPush));
        return handlers;
      },
      "Name of each FFI target -> capsule of its handler.");
  module.def("topoep_depth", &TopoepDepth, "Dependent steps of planner topoep, and the most items of a thread in one.");
}
