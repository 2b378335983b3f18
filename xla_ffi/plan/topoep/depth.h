// How deep a search is: what a device waits for, counted while it runs on the host.

#ifndef TOPOEP_XLA_FFI_PLAN_TOPOEP_DEPTH_H_
#define TOPOEP_XLA_FFI_PLAN_TOPOEP_DEPTH_H_

#include <cstdint>

#include "xla_ffi/plan/plan.h"
#include "xla_ffi/plan/topoep/search.h"
#include "xla_ffi/team/counting_team.h"

namespace topoep {

// On a device with a block of `threads` for each candidate. Candidates run side by side and keep their plans, so that
// the path is what all share, the longest candidate with its entries, the choice, and the copy of the plan chosen. The
// host runs the chosen candidate again instead, only to save memory. Neither the paper's plan nor refinement is
// counted.
Steps PlanDepth(const Problem& problem, const Effort& effort, int32_t threads);

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_TOPOEP_DEPTH_H_
