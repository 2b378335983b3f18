// The Python extension _topoep_tests, which only tests load: the wheel does not hold it.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/native/depth.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/owned_problem.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepHostPull);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepHostPush);

namespace {

// Steps and items of the path, then of the paper's plan.
std::array<int64_t, 4> TopoepDepth(const topoep::Attributes& attributes, const std::vector<int32_t>& omega,
                                   int32_t threads) {
  topoep::OwnedProblem owned;
  if (const std::string wrong = topoep::ReadProblem(attributes, owned); !wrong.empty()) {
    throw std::invalid_argument(wrong);
  }
  topoep::Problem problem = owned.View();
  problem.omega = omega.data();
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
