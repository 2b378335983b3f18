#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/plan_cuda.h"
#include "xla_ffi/plan/scratch.h"
#include "xla_ffi/plan/solve.h"
#include "xla_ffi/team/block_team.cuh"

namespace topoep {
namespace {

constexpr int32_t kThreads = 512;
using Block = BlockTeam<kThreads>;

// What every kernel is told.
struct Task {
  Problem problem;
  Workspace work;
  Plan plan;
};
static_assert(std::is_trivially_copyable_v<Task> && std::is_trivially_destructible_v<Memory>,
              "kernels copy both without their constructors");

// Shared memory of a block. The bodies read the task there, so that no thread keeps a copy of its own.
struct Shared {
  Block::Partials partials;
  alignas(Task) std::byte task[sizeof(Task)];
  alignas(Memory) std::byte memory[sizeof(Memory)];  // this block's own
};

// The task in shared memory, complete; one barrier.
__device__ const Task& Load(const Task& given, Shared& shared) {
  Task* const task = reinterpret_cast<Task*>(shared.task);
  if (threadIdx.x == 0) {
    new (task) Task(given);
    task->work.context.problem = &task->problem;
    new (shared.memory) Memory(task->work.MemoryOf(static_cast<int32_t>(blockIdx.x)));
  }
  __syncthreads();
  return *task;
}

__device__ const Memory& MemoryIn(const Shared& shared) { return *reinterpret_cast<const Memory*>(shared.memory); }

// A part of the tables. Arguments of a kernel may take 4 KiB.
struct Chunk {
  static constexpr int32_t kWords = 240;
  uint4 words[kWords];
};

__global__ void __launch_bounds__(Chunk::kWords)
    WriteChunk(uint4* to, int32_t words, const __grid_constant__ Chunk chunk) {
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  if (i < words) to[i] = chunk.words[i];
}

__global__ void __launch_bounds__(kThreads, 1) BeginPlan(const __grid_constant__ Task given) {
  __shared__ Shared shared;
  const Task& task = Load(given, shared);
  Block team(shared.partials);
  Begin(team, task.work);
}

__global__ void __launch_bounds__(kThreads, 1) RunEntries(const __grid_constant__ Task given) {
  __shared__ Shared shared;
  const Task& task = Load(given, shared);
  Block team(shared.partials);
  for (int32_t run = static_cast<int32_t>(blockIdx.x); run < task.work.NumRuns();
       run += static_cast<int32_t>(gridDim.x)) {
    RunEntry(team, task.problem, task.work, MemoryIn(shared), run);
    team.Sync();
  }
}

__global__ void __launch_bounds__(kThreads, 1) ConcludePlan(const __grid_constant__ Task given) {
  __shared__ Shared shared;
  const Task& task = Load(given, shared);
  Block team(shared.partials);
  Conclude(team, task.problem, task.work, MemoryIn(shared), task.plan);
}

void WriteTables(const std::vector<std::byte>& tables, void* scratch, cudaStream_t stream) {
  static_assert(Arena::kAlignment % sizeof(uint4) == 0, "tables are whole words");
  for (size_t at = 0; at < tables.size(); at += sizeof(Chunk)) {
    const size_t bytes = std::min(sizeof(Chunk), tables.size() - at);
    Chunk chunk;
    std::memcpy(&chunk, tables.data() + at, bytes);
    uint4* to = reinterpret_cast<uint4*>(static_cast<std::byte*>(scratch) + at);
    WriteChunk<<<1, Chunk::kWords, 0, stream>>>(to, static_cast<int32_t>(bytes / sizeof(uint4)), chunk);
  }
}

}  // namespace

const char* LaunchPlan(const Problem& problem, const Plan& plan, void* scratch, CUstream_st* stream) {
  const DomainTable domains(problem);
  const Scratch layout(problem, domains.View(), scratch);
  const Task task{layout.problem, layout.work, plan};
  WriteTables(PackTables(problem, domains.View()), scratch, stream);
  BeginPlan<<<1, kThreads, 0, stream>>>(task);
  RunEntries<<<layout.blocks, kThreads, 0, stream>>>(task);
  ConcludePlan<<<1, kThreads, 0, stream>>>(task);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace topoep
