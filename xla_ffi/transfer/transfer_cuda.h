// The CUDA handlers of replica transfer, as topoep_jax/transfer/device.py calls them. R ranks, Em mains and N slots per
// rank, D elements per expert. Each launches two kernels on the given stream, the schedule by one block, then the body
// by W blocks. It allocates nothing (schedules live in the group: XLA may hand scratch memory to another stream while
// a kernel still runs) and reads nothing back.
//
// TopoepPullCuda, target "topoep_pull":
//   operands   mains [Em, D] of any dtype; slot_expert int32 [R, N], -1 where empty; turn int32 [1]
//   results    slots [N, D] of the same dtype, rows of empty slots are left as they are; turn int32 [1], operand 2
//              aliased, plus one
//   attributes group int64            key of the communicator that topoep_jax.transport.init made on this device
//              domain_of_rank int32[R] must equal the group's
//              pulls int64            enum Pulls of xla_ffi/plan/problem.h
//              expert_bytes, inter_fs_per_byte, intra_fs_per_byte int64
//                                     the planner's prices, from which Pulls::kBest chooses as the planner did
//
// TopoepPushCuda, target "topoep_push":
//   operands   slot_grads float32 [N, D]; main_grads float32 [Em, D]; slot_expert int32 [R, N]; turn int32 [1];
//              carried, any array
//   results    main_grads float32 [Em, D], operand 1 aliased; turn int32 [1], operand 3 aliased, plus one; carried,
//              operand 4 aliased and untouched
//   attributes group int64, domain_of_rank int32 [R] as for a pull
//
// `turn` and `carried` only make calls depend on each other by data (topoep_jax/pipeline/replicas.py; `carried` is the
// gradient of x there). All ranks must pass the same slot_expert. One that
// is no legal placement (placement.h) shows only when the kernels run: they leave a Failure and end the CUDA context,
// as after a time-out. A group that is missing, closed, of another size or made for compilation only is
// FailedPrecondition, and says which and what to do. A shape that does not fit the group's windows is InvalidArgument.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "xla_ffi/plan/problem.h"
#include "xla_ffi/transport/group.h"
#include "xla_ffi/transport/sizes.h"

namespace topoep {

// The int32 [1] by which one call may depend on another: `next` becomes `current` plus one. They may be one.
struct TurnToken {
  const int32_t* current;
  int32_t* next;
};

// Loads all kernels onto the current device, `device`. cudaErrorCooperativeLaunchTooLarge if it cannot hold
// `num_workers` blocks of each together. Before any other call here.
cudaError_t PrepareKernels(int32_t device, int32_t num_workers);

// Enqueue the kernels of one call; an error says why they could not be, and what goes wrong later shows when the stream
// is synchronised. All pointers are to device memory. `layer` fits the group and holds the bytes of a row of the
// arrays; of `prices` the bytes of an expert, the rates and the mode of pulls count.
cudaError_t LaunchPull(const Group& group, const LayerShape& layer, const CostModel& prices, const int32_t* slot_expert,
                       const void* mains, void* slots, TurnToken turn, cudaStream_t stream);
cudaError_t LaunchPush(const Group& group, const LayerShape& layer, const int32_t* slot_expert, const float* slot_grads,
                       float* main_grads, TurnToken turn, cudaStream_t stream);

}  // namespace topoep
