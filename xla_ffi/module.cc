// The Python extension topoep_jax._xla_ffi: hands XLA's handlers to Python as capsules.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/owned_problem.h"
#include "xla_ffi/plan/scratch.h"
#include "xla_ffi/transport/sizes.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepPlan);

namespace {

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
        return handlers;
      },
      "Name of each FFI target -> capsule of its handler.");
  module.def("plan_workspace", &PlanWorkspace, "Bytes of working memory that a call of the planner holds ready.");
  module.def("group_sizes", &GroupSizes, "Bytes of every window of a transport's group, then of its workspaces.");
}
