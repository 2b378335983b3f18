#include "xla_ffi/transport/group.h"

#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/transfer/transfer_cuda.h"

namespace topoep {
namespace {

// NCCL_WIN_REQUIRED_ALIGNMENT for sizes, too: what is registered must not share a page with anything else.
constexpr int64_t kPage = NCCL_WIN_REQUIRED_ALIGNMENT;

int64_t Pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Why a rank cannot take part; Prepare() and Connect() tell it.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int64_t, int32_t>, std::shared_ptr<Group>> groups;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;  // never destroyed: at exit the CUDA driver may be gone before it
  return *registry;
}

}  // namespace

void Group::Check(cudaError_t result, const std::string& action) const {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // or the next launch of this thread would be taken to have failed
  throw Refusal(action + " on device " + std::to_string(options_.device) + ": " + cudaGetErrorString(result));
}

void Group::Check(ncclResult_t result, const std::string& action) const {
  if (result == ncclSuccess) return;
  const char* detail = nccl_.GetLastError(comm_);
  throw Refusal(action + " on rank " + std::to_string(options_.rank) + ": " + nccl_.GetErrorString(result) +
                (detail == nullptr || *detail == '\0' ? "" : std::string(" (") + detail + ")"));
}

std::unique_ptr<Group> Group::Prepare(const NcclApi& nccl, GroupOptions options, std::string* error) try {
  std::unique_ptr<Group> group(new Group(nccl, std::move(options)));
  group->Allocate();
  return group;
} catch (const Refusal& refusal) {
  *error = refusal.what();
  return nullptr;
}

void Group::Allocate() {
  Check(cudaSetDevice(options_.device), "selecting the GPU");
  Check(PrepareKernels(options_.device, options_.num_workers),
        "loading the kernels, of which " + std::to_string(options_.num_workers) + " blocks must fit together");
  AllocateWindows();
  Arena measured;
  LayOut(measured);
  Check(cudaMalloc(&state_, measured.Used()), "allocating the group's state");
  Check(cudaMemset(state_, 0, measured.Used()), "clearing the group's state");
  Check(cudaMemset(memory_[kSignals], 0, on_device_.bytes[kSignals]), "clearing the signals");
  Check(cudaHostAlloc(reinterpret_cast<void**>(&failure_), sizeof(Failure), cudaHostAllocMapped),
        "allocating the error record");
  *failure_ = Failure{};
  Arena arena(state_);
  LayOut(arena);
  on_device_.timeout_ns = options_.timeout_ns;
  WriteTables();
  Check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&on_device_.failures.record), failure_, 0),
        "mapping the error record");
  // Peers write signals as soon as they have connected, so they must find zeros that are there to stay.
  Check(cudaDeviceSynchronize(), "clearing the group's state");
}

void Group::AllocateWindows() {
  for (int32_t w = 0; w < kNumWindows; ++w) {
    const int64_t bytes = Pages(options_.sizes.windows[w]);
    on_device_.bytes[w] = bytes;
    if (bytes == 0) continue;
    Check(nccl_.MemAlloc(&memory_[w], bytes),
          "allocating a window of " + std::to_string(bytes) +
              " bytes (JAX may have preallocated the GPU's memory: lower XLA_PYTHON_CLIENT_MEM_FRACTION)");
    if (reinterpret_cast<uintptr_t>(memory_[w]) % kPage != 0) {
      throw Refusal("NCCL allocated a window that is not aligned to " + std::to_string(kPage) + " bytes");
    }
    on_device_.local[w] = static_cast<char*>(memory_[w]);
  }
}

// Everything but the windows; called to measure, then to place.
void Group::LayOut(Arena& arena) {
  const int32_t num_ranks = options_.num_ranks();
  on_device_.state = RankState(num_ranks, arena);
  on_device_.failures.taken = arena.Take<int32_t>(1);
  domain_of_rank_ = arena.Take<int32_t>(num_ranks);
  domains_ = {arena.Take<int32_t>(num_ranks + 1), arena.Take<int32_t>(num_ranks), arena.Take<int32_t>(num_ranks)};
  for (int32_t i = 0; i < kNumSchedules; ++i) schedules_[i] = arena.Take<char>(options_.sizes.schedules[i]);
}

void Group::WriteTables() {
  const Problem problem = ProblemOf(options_.domain_of_rank, {});
  const DomainTable table(problem);
  const auto write = [&](const int32_t* to, const int32_t* from, int32_t count) {
    Check(cudaMemcpy(const_cast<int32_t*>(to), from, count * sizeof(int32_t), cudaMemcpyHostToDevice),
          "writing the topology");
  };
  write(domain_of_rank_, problem.domain_of_rank, problem.num_ranks);
  write(domains_.begin, table.View().begin, problem.num_domains + 1);
  write(domains_.ranks, table.View().ranks, problem.num_ranks);
  write(domains_.position, table.View().position, problem.num_ranks);
}

bool Group::Connect(const ncclUniqueId& id, std::string* error) {
  try {
    Join(id);
    connected_ = true;
  } catch (const Refusal& refusal) {
    *error = refusal.what();
    if (comm_ != nullptr) nccl_.CommAbort(comm_);  // at once: others may be waiting in NCCL for this rank
    comm_ = nullptr;
  }
  return connected_;
}

void Group::Join(const ncclUniqueId& id) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.commName = "topoep";
  config.blocking = 0;  // or a rank that stays away would hold this one for ever
  Check(cudaSetDevice(options_.device), "selecting the GPU");
  Await(nccl_.CommInitRankConfig(&comm_, options_.num_ranks(), id, options_.rank, &config),
        "creating the communicator");
  ncclDevCommRequirements_t requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  Require(&requirements);
  Register();
  Await(nccl_.DevCommCreate(comm_, &requirements, &on_device_.comm), "creating the device communicator");
  if (uses_network() && on_device_.comm.ginContextCount > kMaxContexts) {
    throw Refusal("NCCL made " + std::to_string(on_device_.comm.ginContextCount) +
                  " GIN contexts, and the kernels know " + std::to_string(kMaxContexts));
  }
}

// Calls on a communicator that does not block begin their work and return, whether or not they say so.
void Group::Await(ncclResult_t result, const char* action) const {
  const auto end = std::chrono::steady_clock::now() + kConnectPatience;
  while (result == ncclSuccess || result == ncclInProgress) {
    const ncclResult_t asked = nccl_.CommGetAsyncError(comm_, &result);
    if (asked != ncclSuccess) result = asked;
    if (result != ncclInProgress) break;
    if (std::chrono::steady_clock::now() > end) {
      throw Refusal(std::string(action) + " on rank " + std::to_string(options_.rank) + " did not end within " +
                    std::to_string(kConnectPatience.count()) +
                    " s: look for a process that has ended or cannot be reached (NCCL_DEBUG=INFO)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Check(result, action);
}

// What the kernels need of NCCL, or why it cannot give that.
void Group::Require(ncclDevCommRequirements_t* requirements) {
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  Check(nccl_.CommQueryProperties(comm_, &properties), "asking for the communicator's properties");
  if (!properties.deviceApiSupport) {
    throw Refusal(
        "NCCL's device API does not work here (it needs cuMem and peer access between all GPUs of a node, and GIN"
        " between nodes)");
  }
  const bool network = properties.nLsaTeams > 1;
  const std::string span = "the ranks span " + std::to_string(properties.nLsaTeams) + " NVLink domains";
  if (network && properties.ginType == NCCL_GIN_TYPE_NONE) {
    throw Refusal(span + " and NCCL has no " +
                  (properties.railedGinType == NCCL_GIN_TYPE_NONE
                       ? "GIN-capable network (NCCL_DEBUG=INFO tells why)"
                       : "GIN connection between different rails, which the kernels need"));
  }
  if (network && nccl_.version != NCCL_VERSION_CODE) {
    throw Refusal("NCCL " + VersionText(nccl_.version) + " is loaded, and kernels that send between NVLink domains" +
                  " must be built with its own headers, not those of " + VersionText(NCCL_VERSION_CODE) +
                  ": install that version, or the matching headers");
  }
  if (network && options_.sizes.windows[kBounce] == 0) {
    throw Refusal(span + ", but the topology has one: correct the topology");
  }
  requirements->ginVaSignalsRequired = false;
  requirements->ginStrongSignalsRequired = network;
  if (network) {
    requirements->ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    requirements->ginSignalCount = kNumWords * options_.num_ranks();
  }
  // NCCL tells no one whether a backend can read. GDAKI can; elsewhere the owner pushes, which works with all. Ranks
  // agree on it: where their backends differ, NCCL has no ginType on any of them.
  on_device_.network_gets = properties.ginType == NCCL_GIN_TYPE_GDAKI;
}

void Group::Register() {
  for (int32_t w = 0; w < kNumWindows; ++w) {
    if (memory_[w] == nullptr) continue;
    Await(nccl_.CommWindowRegister(comm_, memory_[w], on_device_.bytes[w], &on_device_.windows[w],
                                   NCCL_WIN_COLL_SYMMETRIC),
          "registering a window");
    // NCCL's way to say that symmetric memory is not supported.
    if (on_device_.windows[w] == nullptr) {
      throw Refusal("NCCL has no symmetric memory here (it registered a null window)");
    }
  }
}

Failure Group::failure() const {
  const bool failed = *static_cast<const volatile int64_t*>(&failure_->failed) != 0;  // a kernel writes it, last
  return failed ? *failure_ : Failure{};
}

Group::~Group() {
  // Errors have nobody to go to here. After a trap every CUDA call fails, and only an abort frees NCCL's side.
  const bool healthy = cudaSetDevice(options_.device) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
  if (healthy && connected_ && !abandoned_) {
    nccl_.DevCommDestroy(comm_, &on_device_.comm);
    for (ncclWindow_t window : on_device_.windows) {
      if (window != nullptr) nccl_.CommWindowDeregister(comm_, window);
    }
    nccl_.CommDestroy(comm_);
  } else if (comm_ != nullptr) {
    nccl_.CommAbort(comm_);
  }
  for (void* memory : memory_) {
    if (memory != nullptr) nccl_.MemFree(memory);
  }
  cudaFree(state_);
  cudaFreeHost(failure_);
  cudaGetLastError();  // this thread's next user has nothing to do with it
}

void AddGroup(int64_t id, std::shared_ptr<Group> group) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const int32_t device = group->options().device;
  registry.groups[{id, device}] = std::move(group);
}

std::shared_ptr<Group> FindGroup(int64_t id, int32_t device) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.groups.find({id, device});
  return found == registry.groups.end() ? nullptr : found->second;
}

std::shared_ptr<Group> TakeGroup(int64_t id, int32_t device) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  auto taken = registry.groups.extract({id, device});
  return taken.empty() ? nullptr : std::move(taken.mapped());
}

}  // namespace topoep
