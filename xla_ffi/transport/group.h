// The communicator of one rank, its windows and what its kernels keep between calls. Made by an explicit call outside
// of any program, in two phases: Prepare() allocates and may fail on one rank alone; Connect() is collective, so
// callers first agree that every rank has prepared. A rank that fails inside Connect() aborts its communicator, and the
// others, which wait for it in NCCL, get an error; where one only stays away they give up after kConnectPatience.
// Handlers look groups up and never make them.

#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/transport/device_group.h"
#include "xla_ffi/transport/nccl_api.h"
#include "xla_ffi/transport/sizes.h"

namespace topoep {

struct GroupOptions {
  int32_t device;  // CUDA ordinal
  int32_t rank;
  int32_t num_workers;                  // blocks of every kernel; all of them must fit on the device together
  int64_t timeout_ns;                   // of every wait in a kernel
  std::vector<int32_t> domain_of_rank;  // [R]
  GroupSizes sizes;                     // the same on every rank

  int32_t num_ranks() const { return static_cast<int32_t>(domain_of_rank.size()); }
};

// How long each of Connect()'s steps may take; large communicators need minutes.
inline constexpr std::chrono::seconds kConnectPatience(300);

class Group {
 public:
  // Allocates windows and state on the device, and loads the kernels. Null with a reason in `error`.
  static std::unique_ptr<Group> Prepare(const NcclApi& nccl, GroupOptions options, std::string* error);

  // Joins the other ranks: communicator, windows, device communicator. Returns when all have; false with a reason, and
  // without a communicator.
  bool Connect(const ncclUniqueId& id, std::string* error);

  // Some rank did not connect: the destructor then waits for no other rank.
  void Abandon() { abandoned_ = true; }

  // Frees everything; no kernel of the group may run any more. Collective where Connect() succeeded and the group is
  // not abandoned: every rank must do it, the ranks of one process side by side.
  ~Group();

  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const GroupOptions& options() const { return options_; }
  bool connected() const { return connected_; }
  const DeviceGroup& on_device() const { return on_device_; }
  int32_t lsa_size() const { return on_device_.comm.lsaSize; }
  bool uses_network() const { return lsa_size() < options_.num_ranks(); }
  void* schedule(Schedule which) const { return schedules_[which]; }

  // The tables of options().domain_of_rank in device memory.
  const int32_t* domain_of_rank() const { return domain_of_rank_; }
  const Domains& domains() const { return domains_; }

  Failure failure() const;

 private:
  Group(const NcclApi& nccl, GroupOptions options) : nccl_(nccl), options_(std::move(options)) {}

  // These throw what is wrong.
  void Allocate();
  void AllocateWindows();
  void LayOut(Arena& arena);
  void WriteTables();
  void Join(const ncclUniqueId& id);
  void Register();
  void Require(ncclDevCommRequirements_t* requirements);
  void Await(ncclResult_t result, const char* action) const;
  void Check(cudaError_t result, const std::string& action) const;
  void Check(ncclResult_t result, const std::string& action) const;

  const NcclApi& nccl_;
  GroupOptions options_;
  ncclComm_t comm_ = nullptr;
  bool connected_ = false;
  bool abandoned_ = false;
  std::array<void*, kNumWindows> memory_{};
  void* state_ = nullptr;  // one allocation for all that follows
  std::array<void*, kNumSchedules> schedules_{};
  const int32_t* domain_of_rank_ = nullptr;
  Domains domains_{};
  Failure* failure_ = nullptr;
  DeviceGroup on_device_{};
};

// Groups by (group id, CUDA ordinal). A handler's pointer keeps its group alive.
void AddGroup(int64_t id, std::shared_ptr<Group> group);
std::shared_ptr<Group> FindGroup(int64_t id, int32_t device);  // null if unknown
std::shared_ptr<Group> TakeGroup(int64_t id, int32_t device);  // and forgets it

}  // namespace topoep
