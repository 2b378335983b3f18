// The planner on a GPU.

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/plan/call.h"
#include "xla_ffi/plan/plan_cuda.h"
#include "xla_ffi/plan/scratch.h"

namespace topoep {
namespace {

using xla::ffi::Error;

Error Launch(PlanCall& call, CUstream_st* stream) {
  const int64_t needed = PlanScratchBytes(call.problem());
  const int64_t given = static_cast<int64_t>(call.workspace().size_bytes());
  if (given < needed) {
    return Error::InvalidArgument("topoep_plan: workspace has " + std::to_string(given) +
                                  " bytes, and the kernels need " + std::to_string(needed) +
                                  ": the program was traced by another version of topoep_jax, so trace it again");
  }
  const char* failure = LaunchPlan(call.problem(), call.plan(), call.workspace().untyped_data(), stream);
  if (failure == nullptr) return Error::Success();
  return Error::Internal(std::string("topoep_plan: the kernels do not launch: ") + failure);
}

}  // namespace
}  // namespace topoep

// Every call puts the same kernels onto the stream, and nothing else, so a command buffer may record it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(TopoepPlanCuda, ([](CUstream_st* stream, auto... arguments) {
                                topoep::PlanCall call;
                                xla::ffi::Error error = call.Read(arguments...);
                                return error.success() ? topoep::Launch(call, stream) : error;
                              }),
                              topoep::BindPlanCall(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<CUstream_st*>>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
