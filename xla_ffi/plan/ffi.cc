// The planner on the host.

#include "xla/ffi/api/ffi.h"

#include "xla_ffi/plan/call.h"
#include "xla_ffi/plan/solver.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopoepPlan, ([](auto... arguments) {
                                topoep::PlanCall call;
                                xla::ffi::Error error = call.Read(arguments...);
                                if (error.success()) topoep::Solve(call.problem(), call.plan());
                                return error;
                              }),
                              topoep::BindPlanCall(xla::ffi::Ffi::Bind()));
