// The kernels of replica transfer: pull.h and push.h over NcclFabric, and their schedules over one block.

#include <cstdint>
#include <utility>

#include "xla_ffi/team/block_team.cuh"
#include "xla_ffi/transfer/nccl_fabric.cuh"
#include "xla_ffi/transfer/pull.h"
#include "xla_ffi/transfer/push.h"
#include "xla_ffi/transfer/transfer_cuda.h"
#include "xla_ffi/transport/group.h"

namespace topoep {
namespace {

constexpr int32_t kThreads = 512;
using Team = BlockTeam<kThreads>;

// GIN's code spills with fewer registers than 256 threads leave.
template <bool kNetwork>
constexpr int32_t kWorkerThreads = kNetwork ? 256 : kThreads;

__device__ void Advance(EpochToken epoch) {
  if (threadIdx.x == 0) *epoch.next = *epoch.current + 1;
}

__global__ void __launch_bounds__(kThreads, 1)
    PullScheduleKernel(const __grid_constant__ Problem problem, const __grid_constant__ Domains domains,
                       const __grid_constant__ PullSchedule schedule, const int32_t* slot_expert, EpochToken epoch) {
  __shared__ Team::Partials partials;
  Team team(partials);
  MakePullSchedule(team, problem, domains, slot_expert, schedule);
  Advance(epoch);
}

__global__ void __launch_bounds__(kThreads, 1)
    PushScheduleKernel(const __grid_constant__ PushSchedule schedule, const int32_t* slot_expert, EpochToken epoch) {
  __shared__ Team::Partials partials;
  Team team(partials);
  MakePushSchedule(team, slot_expert, schedule);
  Advance(epoch);
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

// W blocks, which the device refuses unless all can run at the same time: they wait for each other.
template <bool kNetwork, class... Parameters, class... Arguments>
cudaError_t LaunchWorkers(void (*kernel)(DeviceGroup, Parameters...), const Group& group, cudaStream_t stream,
                          Arguments&&... arguments) {
  constexpr int32_t kShared = sizeof(BulkRing::Memory);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(group.options().num_workers);
  config.blockDim = dim3(kWorkerThreads<kNetwork>);
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, group.on_device(), std::forward<Arguments>(arguments)...);
}

}  // namespace

cudaError_t LaunchPull(const Group& group, const Problem& problem, const PullSchedule& schedule,
                       const int32_t* slot_expert, const void* mains, void* slots, EpochToken epoch,
                       cudaStream_t stream) {
  PullScheduleKernel<<<1, kThreads, 0, stream>>>(problem, group.domains(), schedule, slot_expert, epoch);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return group.uses_network() ? LaunchWorkers<true>(PullKernel<true>, group, stream, schedule, mains, slots)
                              : LaunchWorkers<false>(PullKernel<false>, group, stream, schedule, mains, slots);
}

cudaError_t LaunchPush(const Group& group, const PushSchedule& schedule, const int32_t* slot_expert,
                       const float* slot_grads, float* main_grads, EpochToken epoch, cudaStream_t stream) {
  PushScheduleKernel<<<1, kThreads, 0, stream>>>(schedule, slot_expert, epoch);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return group.uses_network()
             ? LaunchWorkers<true>(PushKernel<true>, group, stream, schedule, slot_grads, main_grads)
             : LaunchWorkers<false>(PushKernel<false>, group, stream, schedule, slot_grads, main_grads);
}

}  // namespace topoep
