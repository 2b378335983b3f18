// The CPU planner: one call, one plan, bit for bit that of topoep_jax/plan/reference.py.
//
// Solve() is a pure function of the problem. It neither throws nor keeps state, so any number of threads may call it.
// Demand that is negative or sums to 2^31 or more gives kBadInput | kEmpty, no replica and no quota.

#pragma once

#include "xla_ffi/plan/problem.h"

namespace topoep {

void Solve(const Problem& problem, const Plan& plan);

}  // namespace topoep
