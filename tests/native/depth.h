// How deep a plan is: what a device waits for, counted while it runs on the host.

#pragma once

#include <cstdint>

#include "tests/native/counting_team.h"
#include "xla_ffi/plan/problem.h"

namespace topoep {

struct Depth {
  Steps path;   // of a device with a block of threads for each entry: Begin(), the longest candidate, Conclude()
  Steps paper;  // the paper's plan alone, where it runs: beside the candidates, as long as its moves
};

// Entries run side by side and keep their plans. The two boundaries between the three kernels count as steps.
Depth PlanDepth(const Problem& problem, int32_t threads);

}  // namespace topoep
