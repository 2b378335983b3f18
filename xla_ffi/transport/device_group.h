// What the kernels of one rank know of their group: passed to them by value, valid while its Group lives.

#pragma once

#include <nccl.h>
#include <nccl_device/host.h>

#include <cstdint>

#include "xla_ffi/transfer/fabric.h"

namespace topoep {

// The kernels keep a bit for each GIN context.
inline constexpr uint32_t kMaxContexts = 32;

// Peer of a failure that no single peer is to blame for.
inline constexpr int64_t kNoPeer = -1;

// Failures that are not of a Word, numbered on from kNumWords.
inline constexpr int64_t kNetworkCopy = kNumWords;      // the network did not complete a copy
inline constexpr int64_t kIllegalSlot = kNumWords + 1;  // of a rank's row of slot_expert; the step is the slot

struct FailurePlace {
  Failure* record;  // pinned host memory: it outlives the trap that ends the kernel
  int32_t* taken;   // whether a thread of this rank is writing there
};

struct DeviceGroup {
  ncclDevComm comm;
  ncclWindow_t windows[kNumWindows];
  char* local[kNumWindows];  // this rank's own part of each window
  int64_t bytes[kNumWindows];
  RankState state;
  FailurePlace failures;
  int64_t timeout_ns;
  int32_t network_gets;  // whether one-sided reads work beyond the LSA team
};

}  // namespace topoep
