// How fast the transfers' bulk copies (TMA) move bytes inside one GPU's memory, beside cudaMemcpyAsync and beside plain
// loads and stores of every multiprocessor, which show what the memory can do.
//
//   nvcc -std=c++17 -O2 -arch=sm_90 -I. -cudart static -o copies tools/gpu/copies.cu && ./copies
//
// One line of JSON: gigabytes copied in a second (each is read and written once), medians of kRuns after kWarmups. Exit
// status 1 if a copy left out or changed a byte.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "xla_ffi/transfer/bulk_ring.cuh"

namespace topoep {
namespace {

constexpr int32_t kWarmups = 5;
constexpr int32_t kRuns = 30;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kMargin = 4096;  // around the target, which must stay as it was

void Check(cudaError_t result, const char* action) {
  if (result == cudaSuccess) return;
  std::printf("{\"ok\": false, \"reason\": \"%s: %s\"}\n", action, cudaGetErrorString(result));
  std::exit(1);
}

// As a worker of a transfer copies: thread 0 drives the ring. Blocks take equal shares.
__global__ void BulkCopy(char* target, const char* source, int64_t bytes) {
  extern __shared__ __align__(128) char shared[];
  BulkRing ring(*reinterpret_cast<BulkRing::Memory*>(shared));
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int64_t share = (bytes / 16 + gridDim.x - 1) / gridDim.x * 16;
  const int64_t begin = share * blockIdx.x < bytes ? share * blockIdx.x : bytes;
  const int64_t end = begin + share < bytes ? begin + share : bytes;
  ring.Copy(target + begin, source + begin, end - begin);
  ring.Drain();
}

__global__ void PlainCopy(uint4* target, const uint4* source, int64_t words) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) target[i] = source[i];
}

__global__ void Fill(uint32_t* words, int64_t count, uint32_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    words[i] = static_cast<uint32_t>(i) * 2654435761u ^ seed;
  }
}

class Bench {
 public:
  explicit Bench(int64_t most) {
    Check(cudaGetDeviceProperties(&properties_, 0), "cudaGetDeviceProperties");
    Check(cudaMalloc(&source_, most), "cudaMalloc");
    Check(cudaMalloc(&target_, most + 2 * kMargin), "cudaMalloc");
    Check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    constexpr int32_t kShared = sizeof(BulkRing::Memory);
    Check(cudaFuncSetAttribute(BulkCopy, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "shared memory");
    Fill<<<1024, 256, 0, stream_>>>(reinterpret_cast<uint32_t*>(source_), most / 4, 1);
  }

  int32_t processors() const { return properties_.multiProcessorCount; }
  const char* name() const { return properties_.name; }

  void Bulk(int64_t bytes, int32_t workers) {
    BulkCopy<<<workers, 32, sizeof(BulkRing::Memory), stream_>>>(target_ + kMargin, source_, bytes);
  }
  void Plain(int64_t bytes) {
    PlainCopy<<<processors() * 8, 512, 0, stream_>>>(reinterpret_cast<uint4*>(target_ + kMargin),
                                                     reinterpret_cast<const uint4*>(source_), bytes / 16);
  }
  void Memcpy(int64_t bytes) {
    Check(cudaMemcpyAsync(target_ + kMargin, source_, bytes, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
  }

  // Gigabytes a second.
  template <class Copy>
  double Rate(int64_t bytes, Copy copy) {
    std::vector<cudaEvent_t> events(kRuns + 1);
    for (cudaEvent_t& event : events) Check(cudaEventCreate(&event), "cudaEventCreate");
    for (int32_t i = 0; i < kWarmups; ++i) copy();
    Check(cudaEventRecord(events[0], stream_), "cudaEventRecord");
    for (int32_t i = 0; i < kRuns; ++i) {
      copy();
      Check(cudaEventRecord(events[i + 1], stream_), "cudaEventRecord");
    }
    Check(cudaGetLastError(), "launching a copy");
    Check(cudaStreamSynchronize(stream_), "copying");
    std::vector<float> ms(kRuns);
    for (int32_t i = 0; i < kRuns; ++i) Check(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]), "timing");
    for (const cudaEvent_t event : events) Check(cudaEventDestroy(event), "cudaEventDestroy");
    std::nth_element(ms.begin(), ms.begin() + kRuns / 2, ms.end());
    return static_cast<double>(bytes) / 1e6 / ms[kRuns / 2];
  }

  // Whether a bulk copy of `bytes` moves all of them and nothing else.
  bool IsExact(int64_t bytes, int32_t workers) {
    Check(cudaMemsetAsync(target_, 0x5a, bytes + 2 * kMargin, stream_), "cudaMemsetAsync");
    Bulk(bytes, workers);
    std::vector<char> want(bytes + 2 * kMargin, 0x5a);
    std::vector<char> got(want.size());
    Check(cudaMemcpyAsync(want.data() + kMargin, source_, bytes, cudaMemcpyDeviceToHost, stream_), "reading");
    Check(cudaMemcpyAsync(got.data(), target_, static_cast<int64_t>(got.size()), cudaMemcpyDeviceToHost, stream_),
          "reading");
    Check(cudaStreamSynchronize(stream_), "a bulk copy");
    return got == want;
  }

 private:
  cudaDeviceProp properties_{};
  char* source_ = nullptr;
  char* target_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

int Main() {
  Bench bench(1024 * kMiB);
  for (const int64_t bytes : {int64_t{16}, int64_t{48}, int64_t{16384}, int64_t{16400}, 7 * kMiB + 16}) {
    for (const int32_t workers : {1, 8, 33}) {
      if (bench.IsExact(bytes, workers)) continue;
      std::printf("{\"ok\": false, \"reason\": \"a bulk copy of %lld bytes by %d workers is wrong\"}\n",
                  static_cast<long long>(bytes), workers);
      return 1;
    }
  }
  std::printf("{\"ok\": true, \"gpu\": \"%s\", \"processors\": %d, \"gigabytes_a_second\": {", bench.name(),
              bench.processors());
  const char* separator = "";
  for (const int64_t mib : {1, 16, 128, 1024}) {
    const int64_t bytes = mib * kMiB;
    std::printf("%s\"%lld MiB\": {\"memcpy\": %.1f, \"plain\": %.1f", separator, static_cast<long long>(mib),
                bench.Rate(bytes, [&] { bench.Memcpy(bytes); }), bench.Rate(bytes, [&] { bench.Plain(bytes); }));
    for (const int32_t workers : {1, 4, 8, 16, 32, 64, bench.processors()}) {
      std::printf(", \"bulk %d\": %.1f", workers, bench.Rate(bytes, [&] { bench.Bulk(bytes, workers); }));
    }
    std::printf("}");
    separator = ", ";
  }
  std::printf("}}\n");
  return 0;
}

}  // namespace
}  // namespace topoep

int main() { return topoep::Main(); }
