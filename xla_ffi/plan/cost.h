// Predicted time of a plan: the integer arithmetic of topoep_jax/plan/cost.py.

#ifndef TOPOEP_XLA_FFI_PLAN_COST_H_
#define TOPOEP_XLA_FFI_PLAN_COST_H_

#include <cstdint>

#include "xla_ffi/plan/plan.h"

namespace topoep {

// Picoseconds to move `bytes` at `fs_per_byte`; the one rounding rule, applied once per term.
inline int64_t LinkPs(int64_t bytes, int64_t fs_per_byte) { return bytes * fs_per_byte / 1000; }

// Picoseconds of the layer under problem.objective; reads only slot_expert [R, N] and quota [R, R, J].
int64_t PredictPs(const Problem& problem, const int32_t* slot_expert, const int32_t* quota);

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_COST_H_
