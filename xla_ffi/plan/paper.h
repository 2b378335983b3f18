// The paper's two-stage planner, with the ties of topoep_jax/plan/reference.py.

#ifndef TOPOEP_XLA_FFI_PLAN_PAPER_H_
#define TOPOEP_XLA_FFI_PLAN_PAPER_H_

#include "xla_ffi/plan/plan.h"

namespace topoep {

// Writes slot_expert (in order of placement) and quota; Finish() makes them final. Demand must be valid.
void PaperPlan(const Problem& problem, const Plan& plan);

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_PAPER_H_
