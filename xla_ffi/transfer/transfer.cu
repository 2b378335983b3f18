// The kernels of replica transfer: pull.h and push.h over NcclFabric, and their schedules over one block.

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/team/block_team.cuh"
#include "xla_ffi/transfer/nccl_fabric.cuh"
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

// W blocks, refused unless the device can hold all of them together: they wait for each other. A cooperative launch
// would also check that, but such kernels of several streams may follow each other, and ranks on one GPU would hang.
template <bool kNetwork, class... Parameters, class... Arguments>
cudaError_t LaunchWorkers(void (*kernel)(DeviceGroup, Parameters...), const Group& group, cudaStream_t stream,
                          Arguments... arguments) {
  constexpr int32_t kShared = sizeof(BulkRing::Memory);
  const int32_t workers = group.options().num_workers;
  int32_t blocks = 0;
  int32_t processors = 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kWorkerThreads<kNetwork>, kShared);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, group.options().device);
  if (error != cudaSuccess) return error;
  if (workers > blocks * processors) return cudaErrorCooperativeLaunchTooLarge;
  kernel<<<workers, kWorkerThreads<kNetwork>, kShared, stream>>>(group.on_device(), arguments...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchPull(const Group& group, const LayerShape& layer, const Cost& prices, const int32_t* slot_expert,
                       const void* mains, void* slots, EpochToken epoch, cudaStream_t stream) {
  Problem problem = ProblemOf(group.options().domain_of_rank, layer);
  const DomainTable table(problem);
  Arena arena(group.schedule(kPullSchedule));
  const PullSchedule schedule(problem, table.View(), group.options().rank, layer.expert_bytes, arena);
  problem.domain_of_rank = group.domain_of_rank();
  problem.cost.expert_bytes = prices.expert_bytes;
  problem.cost.inter_fs_per_byte = prices.inter_fs_per_byte;
  problem.cost.intra_fs_per_byte = prices.intra_fs_per_byte;
  PullScheduleKernel<<<1, kThreads, 0, stream>>>(problem, group.domains(), schedule, slot_expert, epoch);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return group.uses_network() ? LaunchWorkers<true>(PullKernel<true>, group, stream, schedule, mains, slots)
                              : LaunchWorkers<false>(PullKernel<false>, group, stream, schedule, mains, slots);
}

cudaError_t LaunchPush(const Group& group, const LayerShape& layer, const int32_t* slot_expert, const float* slot_grads,
                       float* main_grads, EpochToken epoch, cudaStream_t stream) {
  Arena arena(group.schedule(kPushSchedule));
  const int64_t half_bytes = RoundDown(group.options().sizes.windows[kStaging] / 2);
  const PushSchedule schedule(group.options().num_ranks(), layer.num_slots, layer.mains_per_rank, group.options().rank,
                              layer.expert_bytes, half_bytes, arena);
  PushScheduleKernel<<<1, kThreads, 0, stream>>>(schedule, slot_expert, epoch);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return group.uses_network()
             ? LaunchWorkers<true>(PushKernel<true>, group, stream, schedule, slot_grads, main_grads)
             : LaunchWorkers<false>(PushKernel<false>, group, stream, schedule, slot_grads, main_grads);
}

}  // namespace topoep
