// The planner on a GPU: three kernels around the bodies of solve.h, after some that write the problem's tables.

#pragma once

#include "xla_ffi/plan/problem.h"

struct CUstream_st;  // cudaStream_t points to it

namespace topoep {

// Puts the kernels onto the stream and returns; the host waits for nothing, allocates nothing on the device and reads
// nothing back. All they need travels as their arguments, so that a CUDA graph may record and repeat them.
//
// omega and the plan are memory of the device; domain_of_rank, rank_speed and effort of the host. `scratch`
// is memory of the device, PlanScratchBytes() from a multiple of 16 on, that nobody else touches while the kernels run.
//
// Returns nullptr, or why the kernels cannot be launched.
const char* LaunchPlan(const Problem& problem, const Plan& plan, void* scratch, CUstream_st* stream);

}  // namespace topoep
