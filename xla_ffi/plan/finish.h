// What every planner shares: the plan to start from, and the last step.

#ifndef TOPOEP_XLA_FFI_PLAN_FINISH_H_
#define TOPOEP_XLA_FFI_PLAN_FINISH_H_

#include "xla_ffi/plan/plan.h"

namespace topoep {

// Writes slot_expert and quota of the plan without replicas: every expert runs on its main rank.
void EmptyPlan(const Problem& problem, const Plan& plan);

// Drops replicas without rows and sorts the others of each rank by expert; their quotas move along.
void SortSlots(const Problem& problem, const Plan& plan);

// Turns a planner's slots (any order, some perhaps without rows; unused ones last and -1) and quotas into the final
// plan: drops replicas without rows, sorts the others by expert, and fills in rank_load, predicted_ps and status.
void Finish(const Problem& problem, const Plan& plan);

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_FINISH_H_
