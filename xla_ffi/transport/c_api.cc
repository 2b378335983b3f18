// What topoep_jax/transport/device.py calls through ctypes. Functions return 0, or 1 with the reason in `error`.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/transport/group.h"
#include "xla_ffi/transport/nccl_api.h"

namespace topoep {
namespace {

int Result(const std::string& reason, char* error, int64_t error_size) {
  if (reason.empty()) return 0;
  const int64_t length = std::min<int64_t>(reason.size(), error_size - 1);
  std::memcpy(error, reason.data(), length);
  error[length] = '\0';
  return 1;
}

// work(i, reason) for each local device on a thread of its own: what is collective must go side by side, and the
// caller's current device stays what it was. The first reason, or nothing.
std::string OnEach(int32_t num_local, const std::function<void(int32_t, std::string*)>& work) {
  std::vector<std::string> reasons(num_local);
  std::vector<std::thread> threads;
  threads.reserve(num_local);
  for (int32_t i = 0; i < num_local; ++i) threads.emplace_back(work, i, &reasons[i]);
  for (std::thread& thread : threads) thread.join();
  const auto failed = std::find_if(reasons.begin(), reasons.end(), [](const std::string& r) { return !r.empty(); });
  return failed == reasons.end() ? "" : *failed;
}

void Destroy(int64_t id, const int32_t* devices, int32_t num_local, bool everywhere) {
  OnEach(num_local, [&](int32_t i, std::string*) {
    const std::shared_ptr<Group> group = TakeGroup(id, devices[i]);
    if (group != nullptr && !everywhere) group->Abandon();
  });
}

}  // namespace

extern "C" {

// Loads NCCL: what is loaded already, else `path` (may be null). `version` is NCCL's code, as 23203.
int topoep_nccl_load(const char* path, int32_t* version, char* error, int64_t error_size) {
  std::string reason;
  const NcclApi* nccl = LoadNccl(path, &reason);
  if (nccl != nullptr) *version = nccl->version;
  return Result(reason, error, error_size);
}

// Fills `id` with NCCL_UNIQUE_ID_BYTES bytes, for one process of one communicator to hand to the others.
int topoep_unique_id(char* id, char* error, int64_t error_size) {
  std::string reason;
  const NcclApi* nccl = LoadNccl(nullptr, &reason);
  if (nccl == nullptr) return Result(reason, error, error_size);
  ncclUniqueId unique;
  const ncclResult_t result = nccl->GetUniqueId(&unique);
  if (result != ncclSuccess) reason = std::string("making a unique id: ") + nccl->GetErrorString(result);
  std::memcpy(id, unique.internal, sizeof(unique.internal));
  return Result(reason, error, error_size);
}

// Allocates the windows and the state of group `id` on each of this process's devices; on failure nothing is left.
// `bytes` are those of every window, then of every schedule.
int topoep_group_prepare(int64_t id, const int32_t* devices, const int32_t* ranks, int32_t num_local,
                         const int32_t* domain_of_rank, int32_t num_ranks, int32_t num_workers, int64_t timeout_ns,
                         const int64_t* bytes, int32_t num_bytes, char* error, int64_t error_size) {
  std::string reason;
  const NcclApi* nccl = LoadNccl(nullptr, &reason);
  if (nccl == nullptr) return Result(reason, error, error_size);
  constexpr int32_t kExpected = kNumWindows + kNumSchedules;
  if (num_bytes != kExpected) {
    reason = "the CUDA library expects " + std::to_string(kExpected) + " sizes, not " + std::to_string(num_bytes) +
             ": build the extension _xla_ffi and the CUDA library from the same sources";
    return Result(reason, error, error_size);
  }
  GroupSizes sizes;
  std::copy_n(bytes, kNumWindows, sizes.windows.begin());
  std::copy_n(bytes + kNumWindows, kNumSchedules, sizes.schedules.begin());
  reason = OnEach(num_local, [&](int32_t i, std::string* why) {
    GroupOptions options{devices[i], ranks[i], num_workers, timeout_ns, {domain_of_rank, domain_of_rank + num_ranks},
                         sizes};
    std::unique_ptr<Group> group = Group::Prepare(*nccl, std::move(options), why);
    if (group != nullptr) AddGroup(id, std::move(group));
  });
  if (!reason.empty()) Destroy(id, devices, num_local, false);
  return Result(reason, error, error_size);
}

// Joins each local device to its communicator, whose unique id is unique_ids[i]. Collective over all ranks; where one
// fails, the others fail, too, or must be destroyed with everywhere = 0. Also tells how many neighbouring ranks share
// memory.
int topoep_group_connect(int64_t id, const int32_t* devices, int32_t num_local, const char* unique_ids,
                         int32_t* lsa_size, char* error, int64_t error_size) {
  const std::string reason = OnEach(num_local, [&](int32_t i, std::string* why) {
    const std::shared_ptr<Group> group = FindGroup(id, devices[i]);
    if (group == nullptr) {
      *why = "group " + std::to_string(id) + " is not prepared on device " + std::to_string(devices[i]);
      return;
    }
    ncclUniqueId unique;
    std::memcpy(unique.internal, unique_ids + int64_t{i} * sizeof(unique.internal), sizeof(unique.internal));
    if (group->Connect(unique, why)) lsa_size[i] = group->lsa_size();
  });
  return Result(reason, error, error_size);
}

// Frees group `id` on the local devices; unknown ones are skipped. `everywhere`: every rank had connected, and does the
// same now; else nobody is waited for.
void topoep_group_destroy(int64_t id, const int32_t* devices, int32_t num_local, int32_t everywhere) {
  Destroy(id, devices, num_local, everywhere != 0);
}

// The first time-out of a local rank: 1 and {word, peer, value} in `record`, else 0. Works after the kernel's trap.
int topoep_group_failure(int64_t id, int32_t device, int64_t* record) {
  const std::shared_ptr<Group> group = FindGroup(id, device);
  if (group == nullptr) return 0;
  const Failure failure = group->failure();
  record[0] = failure.word;
  record[1] = failure.peer;
  record[2] = failure.value;
  return failure.failed != 0 ? 1 : 0;
}

}  // extern "C"

}  // namespace topoep
