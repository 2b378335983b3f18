// What the kernels of one rank know of their group: passed to them by value, valid while its Group lives.

#ifndef TOPOEP_XLA_FFI_TRANSPORT_DEVICE_GROUP_H_
#define TOPOEP_XLA_FFI_TRANSPORT_DEVICE_GROUP_H_

#include <nccl.h>
#include <nccl_device/host.h>

#include <cstdint>

#include "xla_ffi/transfer/fabric.h"

namespace topoep {

// The kernels keep a bit for each GIN context.
inline constexpr uint32_t kMaxContexts = 32;

// Peer of a failure that no single peer is to blame for.
inline constexpr int64_t kNoPeer = -1;

struct DeviceGroup {
  ncclDevComm comm;
  ncclWindow_t windows[kNumWindows];
  char* local[kNumWindows];  // this rank's own part of each window
  int64_t bytes[kNumWindows];
  RankState state;
  Failure* failure;  // pinned host memory: it outlives the trap that ends the kernel
  int32_t* failing;  // whether a thread of this rank is writing there
  int64_t timeout_ns;
  int32_t network_gets;  // whether one-sided reads work beyond the LSA team
};

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_TRANSPORT_DEVICE_GROUP_H_
