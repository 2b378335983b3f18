// How a Group connects and ends, over an NCCL and a CUDA that only keep books: no GPU, no network, one rank.
// tests/cuda/group_test.py builds it, since NCCL's and CUDA's headers are needed. Prints what is wrong; exit status 0
// if nothing is.

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device/host.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "xla_ffi/transfer/transfer_cuda.h"
#include "xla_ffi/transport/group.h"
#include "xla_ffi/transport/nccl_api.h"

// Host memory stands for the device's.
extern "C" {

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of CUDA"; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, size_t size) {
  *memory = std::malloc(size);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) { return cudaMalloc(memory, size); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t size) {
  std::memset(memory, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

}  // extern "C"

namespace topoep {
namespace {

constexpr int kPolls = 3;  // until a step has ended

// What the stand-ins do, and what was asked of them.
struct Books {
  cudaError_t kernels = cudaSuccess;
  int lsa_teams = 1;
  int failing_step = 0;  // 1: the communicator, 2..: the windows, then the device communicator

  int steps = 0;
  int polls = 0;
  int too_early = 0;  // calls while another was under way
  int aborts = 0;
  int destroys = 0;

  // Half of the steps say that they are under way, the others do not.
  ncclResult_t Begin() {
    Touch();
    polls = 0;
    return ++steps % 2 == 0 ? ncclSuccess : ncclInProgress;
  }
  void Touch() { too_early += steps > 0 && polls < kPolls ? 1 : 0; }
};
Books books;
int wrong = 0;

void Expect(bool right, const char* scene, const std::string& what) {
  if (right) return;
  std::printf("%s: %s\n", scene, what.c_str());
  ++wrong;
}

NcclApi BookKeeper() {
  NcclApi api{};
  api.version = NCCL_VERSION_CODE + 1;
  api.GetErrorString = [](ncclResult_t) { return "an error of NCCL"; };
  api.GetLastError = [](ncclComm_t) { return ""; };
  api.CommInitRankConfig = [](ncclComm_t* comm, int, ncclUniqueId, int, ncclConfig_t* config) {
    Expect(config->blocking == 0, "CommInitRankConfig", "the communicator blocks");
    *comm = reinterpret_cast<ncclComm_t>(&books);
    return books.Begin();
  };
  api.CommGetAsyncError = [](ncclComm_t, ncclResult_t* result) {
    *result =
        ++books.polls < kPolls ? ncclInProgress : (books.steps == books.failing_step ? ncclRemoteError : ncclSuccess);
    return ncclSuccess;
  };
  api.CommQueryProperties = [](ncclComm_t, ncclCommProperties_t* properties) {
    books.Touch();
    properties->deviceApiSupport = true;
    properties->nLsaTeams = books.lsa_teams;
    properties->ginType = NCCL_GIN_TYPE_GDAKI;
    return ncclSuccess;
  };
  api.MemAlloc = [](void** memory, size_t size) {
    *memory = std::aligned_alloc(NCCL_WIN_REQUIRED_ALIGNMENT, size);
    return ncclSuccess;
  };
  api.MemFree = [](void* memory) {
    std::free(memory);
    return ncclSuccess;
  };
  api.CommWindowRegister = [](ncclComm_t, void* memory, size_t, ncclWindow_t* window, int) {
    *window = reinterpret_cast<ncclWindow_t>(memory);
    return books.Begin();
  };
  api.CommWindowDeregister = [](ncclComm_t, ncclWindow_t) { return ncclSuccess; };
  api.DevCommCreate = [](ncclComm_t, const ncclDevCommRequirements_t*, ncclDevComm_t* comm) {
    comm->lsaSize = 2 / books.lsa_teams;
    return books.Begin();
  };
  api.DevCommDestroy = [](ncclComm_t, const ncclDevComm_t*) { return ncclSuccess; };
  api.CommDestroy = [](ncclComm_t) {
    ++books.destroys;
    return ncclSuccess;
  };
  api.CommAbort = [](ncclComm_t) {
    ++books.aborts;
    return ncclSuccess;
  };
  return api;
}

// A group of two ranks that is prepared, connected and ended; `reason` is what must be said, "" if nothing goes wrong.
void Play(const char* scene, const Books& start, const std::string& reason, bool abandon = false) {
  books = start;
  const NcclApi api = BookKeeper();
  GroupSizes sizes;
  sizes.windows.fill(8192);
  sizes.schedules = {64, 64};
  std::string error;
  {
    const std::unique_ptr<Group> group = Group::Prepare(api, {0, 0, 32, 1000, {0, 0}, sizes}, &error);
    if (group != nullptr) {
      const bool connected = group->Connect(ncclUniqueId{}, &error);
      Expect(connected == reason.empty(), scene, "Connect() is mistaken");
      Expect(connected == group->connected(), scene, "connected() is mistaken");
      Expect(books.aborts == (connected ? 0 : 1), scene, "a rank that failed aborts at once");
      if (abandon) group->Abandon();
    }
    Expect((group == nullptr) == (start.kernels != cudaSuccess), scene, "Prepare() is mistaken");
  }
  const bool joined = start.kernels == cudaSuccess;
  const bool agreed = reason.empty() && !abandon;
  Expect(error.find(reason) == 0 && error.empty() == reason.empty(), scene, "said '" + error + "'");
  Expect(books.too_early == 0, scene, "NCCL was called while it was at work");
  Expect(books.destroys == (agreed ? 1 : 0), scene, std::to_string(books.destroys) + " communicators were destroyed");
  Expect(books.aborts == (agreed || !joined ? 0 : 1), scene, std::to_string(books.aborts) + " were aborted");
}

int Main() {
  Play("all is well, with a newer NCCL", {}, "");
  Play("another rank failed", {}, "", true);
  Books start;
  for (start.failing_step = 1; start.failing_step <= kNumWindows + 2; ++start.failing_step) {
    Play("a step fails", start,
         start.failing_step == 1                 ? "creating the communicator on rank 0: an error of NCCL"
         : start.failing_step == kNumWindows + 2 ? "creating the device communicator on rank 0: an error of NCCL"
                                                 : "registering a window on rank 0: an error of NCCL");
  }
  start = {};
  start.lsa_teams = 2;
  Play("a newer NCCL over a network", start, "NCCL " + VersionText(NCCL_VERSION_CODE + 1) + " is loaded");
  start = {};
  start.kernels = cudaErrorCooperativeLaunchTooLarge;
  Play("blocks that do not fit", start, "loading the kernels, of which 32 blocks must fit together on device 0");
  return wrong == 0 ? 0 : 1;
}

}  // namespace

cudaError_t PrepareKernels(int32_t, int32_t) { return books.kernels; }

}  // namespace topoep

int main() { return topoep::Main(); }
