#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "tools/gpu/plan_runner.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/plan_cuda.h"
#include "xla_ffi/plan/scratch.h"

namespace topoep {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

// Memory of the device.
template <class T>
class Array {
 public:
  explicit Array(int64_t count) : bytes_(count * sizeof(T)) { Check(cudaMalloc(&data_, bytes_ + 1), "cudaMalloc"); }
  explicit Array(const std::vector<T>& values) : Array(static_cast<int64_t>(values.size())) {
    Check(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice), "copying to the device");
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  void Fill(uint8_t byte) const { Check(cudaMemset(data_, byte, bytes_), "cudaMemset"); }
  std::vector<T> Read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    Check(cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDeviceToHost), "copying from the device");
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

}  // namespace

struct PlanRunner::Memory {
  explicit Memory(const StoredProblem& stored)
      : problem(stored.View()),
        domains(problem),
        omega(stored.omega),
        slot_expert(static_cast<int64_t>(stored.right.slot_expert.size())),
        quota(static_cast<int64_t>(stored.right.quota.size())),
        rank_load(static_cast<int64_t>(stored.right.rank_load.size())),
        predicted_ps(2),
        status(1),
        scratch(Scratch(problem, domains.View(), nullptr).bytes) {
    problem.omega = omega.data();
    Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  }
  ~Memory() { cudaStreamDestroy(stream); }

  void Launch() {
    const Plan plan{slot_expert.data(), quota.data(), rank_load.data(), predicted_ps.data(), status.data()};
    if (const char* error = LaunchPlan(problem, plan, scratch.data(), stream); error != nullptr) {
      std::fprintf(stderr, "LaunchPlan: %s\n", error);
      std::exit(2);
    }
  }

  Problem problem;
  DomainTable domains;
  Array<int32_t> omega, slot_expert, quota, rank_load, predicted_ps, status;
  Array<uint8_t> scratch;
  cudaStream_t stream = nullptr;
};

PlanRunner::PlanRunner(const StoredProblem& stored) : memory_(new Memory(stored)) {}
PlanRunner::~PlanRunner() = default;

Answer PlanRunner::Solve(uint8_t fill) {
  const Memory& m = *memory_;
  for (const Array<int32_t>* array : {&m.slot_expert, &m.quota, &m.rank_load, &m.predicted_ps, &m.status}) {
    array->Fill(fill);
  }
  if (fill != 0) m.scratch.Fill(fill);
  Check(cudaDeviceSynchronize(), "filling memory");
  memory_->Launch();
  Check(cudaStreamSynchronize(m.stream), "the planner's kernels");
  return {m.slot_expert.Read(), m.quota.Read(), m.rank_load.Read(), m.predicted_ps.Read(), m.status.Read()};
}

std::vector<float> PlanRunner::Times(int32_t warmups, int32_t runs, bool graph) {
  const cudaStream_t stream = memory_->stream;
  cudaGraphExec_t replayed = nullptr;
  if (graph) {
    cudaGraph_t recorded = nullptr;
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a graph");
    memory_->Launch();
    Check(cudaStreamEndCapture(stream, &recorded), "recording a graph");
    Check(cudaGraphInstantiate(&replayed, recorded, 0), "cudaGraphInstantiate");
    Check(cudaGraphDestroy(recorded), "cudaGraphDestroy");
  }
  std::vector<cudaEvent_t> events(runs + 1);
  for (cudaEvent_t& event : events) Check(cudaEventCreate(&event), "cudaEventCreate");
  for (int32_t i = 0; i < warmups + runs; ++i) {
    if (i == warmups) Check(cudaEventRecord(events[0], stream), "cudaEventRecord");
    if (graph) {
      Check(cudaGraphLaunch(replayed, stream), "cudaGraphLaunch");
    } else {
      memory_->Launch();
    }
    if (i >= warmups) Check(cudaEventRecord(events[i - warmups + 1], stream), "cudaEventRecord");
  }
  Check(cudaStreamSynchronize(stream), "the planner's kernels");
  std::vector<float> times(runs);
  for (int32_t i = 0; i < runs; ++i) {
    Check(cudaEventElapsedTime(&times[i], events[i], events[i + 1]), "cudaEventElapsedTime");
    times[i] *= 1000;
  }
  for (const cudaEvent_t event : events) Check(cudaEventDestroy(event), "cudaEventDestroy");
  if (replayed != nullptr) Check(cudaGraphExecDestroy(replayed), "cudaGraphExecDestroy");
  return times;
}

}  // namespace topoep
