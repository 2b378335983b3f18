// The Python extension topoep_jax._xla_ffi: hands XLA's handlers to Python as capsules.

#include <pybind11/pybind11.h>

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(TopoepPlan);

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
}
