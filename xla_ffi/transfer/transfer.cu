// The kernels of replica transfer: pull.h and push.h over NcclFabric, and their schedules over one block.

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/team/block_team.cuh"
#include "xla_ffi/transfer/nccl_fabric.cuh"
#include "xla_ffi/transfer/placement.h"
#include "xla_ffi/transfer/pull.h"
#include "xla_ffi/transfer/push.h"
#include "xla_ffi/transfer/transfer_cuda.h"
#include "xla_ffi/transfer/windows.h"
#include "xla_ffi/transport/group.h"
#include "xla_ffi/transport/sizes.h"

namespace topoep {
namespace {

constexpr int32_t kThreads = 512;
using Team = BlockTeam<kThreads>;

// GIN's code spills with fewer registers than 256 threads leave.
template <bool kNetwork>
constexpr int32_t kWorkerThreads = kNetwork ? 256 : kThreads;

constexpr int32_t kRingBytes = sizeof(BulkRing::Memory);

__device__ void Advance(TurnToken turn) {
  if (threadIdx.x == 0) *turn.next = *turn.current + 1;
}

// What an illegal plan is reported to, and the calls of this kind that ended before.
struct PlanCheck {
  FailurePlace failures;
  const int64_t* calls;
};

// Ends the kernel before it writes by a plan that would take it out of bounds, or ranks into waiting for each other.
__device__ void RequireLegal(const PlanCheck& check, const RankLayer& layer, const int32_t* slot_expert) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < layer.num_ranks * layer.num_slots; i += kThreads) {
    if (FlawOf(layer, slot_expert, i) == Flaw::kNone) continue;
    Fail(check.failures, kIllegalSlot, i / layer.num_slots, Stamp(*check.calls + 1, i % layer.num_slots));
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1)
    PullScheduleKernel(const __grid_constant__ Problem problem, const __grid_constant__ Domains domains,
                       const __grid_constant__ PullSchedule schedule, PlanCheck check, const int32_t* slot_expert,
                       TurnToken turn) {
  __shared__ Team::Partials partials;
  Team team(partials);
  RequireLegal(check, schedule, slot_expert);
  MakePullSchedule(team, problem, domains, slot_expert, schedule);
  Advance(turn);
}

__global__ void __launch_bounds__(kThreads, 1)
    PushScheduleKernel(const __grid_constant__ PushSchedule schedule, PlanCheck check, const int32_t* slot_expert,
                       TurnToken turn) {
  __shared__ Team::Partials partials;
  Team team(partials);
  RequireLegal(check, schedule, slot_expert);
  MakePushSchedule(team, slot_expert, schedule);
  Advance(turn);
}

// kNetwork: some ranks are outside of this rank's LSA team.
template <bool kNetwork>
__global__ void __launch_bounds__(kWorkerThreads<kNetwork>, 1)
    PullKernel(const __grid_constant__ DeviceGroup group, const __grid_constant__ PullSchedule schedule,
               const void* mains, void* slots) {
  extern __shared__ __align__(128) char shared[];
  NcclFabric<kNetwork> fabric(group, *reinterpret_cast<BulkRing::Memory*>(shared));
  PullReplicas(fabric, schedule, mains, slots);
}

template <bool kNetwork>
__global__ void __launch_bounds__(kWorkerThreads<kNetwork>, 1)
    PushKernel(const __grid_constant__ DeviceGroup group, const __grid_constant__ PushSchedule schedule,
               const float* slot_grads, float* main_grads) {
  extern __shared__ __align__(128) char shared[];
  NcclFabric<kNetwork> fabric(group, *reinterpret_cast<BulkRing::Memory*>(shared));
  PushGradients(fabric, schedule, slot_grads, main_grads);
}

// The kernel as it will run on this device: loaded, and allowed the shared memory that it takes. CUDA would load it
// with its first launch, for which it may have to wait for the kernels that run, and those may wait for peers that wait
// for this launch. Workers wait for each other, too, so a device that cannot hold all of them together is refused. (A
// cooperative launch would also check that, but such kernels of several streams may follow each other, and ranks on one
// GPU would hang.)
template <class... Parameters>
cudaError_t PrepareKernel(void (*kernel)(Parameters...), int32_t blocks, int32_t threads, int32_t shared,
                          int32_t num_processors) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  int32_t resident = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared);
  if (error != cudaSuccess) return error;
  return blocks <= resident * num_processors ? cudaSuccess : cudaErrorCooperativeLaunchTooLarge;
}

template <class... Parameters, class... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), int32_t blocks, int32_t threads, int32_t shared, cudaStream_t stream,
                   Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // or the next launch of this thread would be taken to have failed
  return error;
}

// A body's kernel, of which a group uses one of two.
template <class Local, class Network, class... Arguments>
cudaError_t LaunchWorkers(Local local, Network network, const Group& group, cudaStream_t stream,
                          Arguments... arguments) {
  const int32_t workers = group.options().num_workers;
  return group.uses_network()
             ? Launch(network, workers, kWorkerThreads<true>, kRingBytes, stream, group.on_device(), arguments...)
             : Launch(local, workers, kWorkerThreads<false>, kRingBytes, stream, group.on_device(), arguments...);
}

}  // namespace

cudaError_t PrepareKernels(int32_t device, int32_t num_workers) {
  int32_t processors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const auto prepare = [&](auto kernel, int32_t blocks, int32_t threads, int32_t shared) {
    if (error == cudaSuccess) error = PrepareKernel(kernel, blocks, threads, shared, processors);
  };
  prepare(PullScheduleKernel, 1, kThreads, 0);
  prepare(PushScheduleKernel, 1, kThreads, 0);
  prepare(PullKernel<false>, num_workers, kWorkerThreads<false>, kRingBytes);
  prepare(PushKernel<false>, num_workers, kWorkerThreads<false>, kRingBytes);
  prepare(PullKernel<true>, num_workers, kWorkerThreads<true>, kRingBytes);
  prepare(PushKernel<true>, num_workers, kWorkerThreads<true>, kRingBytes);
  return error;
}

cudaError_t LaunchPull(const Group& group, const LayerShape& layer, const CostModel& prices, const int32_t* slot_expert,
                       const void* mains, void* slots, TurnToken turn, cudaStream_t stream) {
  Problem problem = ProblemOf(group.options().domain_of_rank, layer);
  const DomainTable table(problem);
  Arena arena(group.schedule(kPullSchedule));
  const PullSchedule schedule(problem, table.View(), group.options().rank, layer.expert_bytes, arena);
  problem.domain_of_rank = group.domain_of_rank();
  problem.cost = prices;
  const PlanCheck check{group.on_device().failures, group.on_device().state.pulls};
  const cudaError_t error =
      Launch(PullScheduleKernel, 1, kThreads, 0, stream, problem, group.domains(), schedule, check, slot_expert, turn);
  if (error != cudaSuccess) return error;
  return LaunchWorkers(PullKernel<false>, PullKernel<true>, group, stream, schedule, mains, slots);
}

cudaError_t LaunchPush(const Group& group, const LayerShape& layer, const int32_t* slot_expert, const float* slot_grads,
                       float* main_grads, TurnToken turn, cudaStream_t stream) {
  Arena arena(group.schedule(kPushSchedule));
  const int64_t half_bytes = RoundDown(group.options().sizes.windows[kStaging] / 2);
  const PushSchedule schedule(ProblemOf(group.options().domain_of_rank, layer), group.options().rank,
                              layer.expert_bytes, half_bytes, arena);
  const PlanCheck check{group.on_device().failures, group.on_device().state.pushes};
  const cudaError_t error = Launch(PushScheduleKernel, 1, kThreads, 0, stream, schedule, check, slot_expert, turn);
  if (error != cudaSuccess) return error;
  return LaunchWorkers(PushKernel<false>, PushKernel<true>, group, stream, schedule, slot_grads, main_grads);
}

}  // namespace topoep
