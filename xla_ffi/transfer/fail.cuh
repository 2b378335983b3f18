// How a kernel says that it cannot go on: a record that outlives it, and a trap that ends it.

#ifndef TOPOEP_XLA_FFI_TRANSFER_FAIL_CUH_
#define TOPOEP_XLA_FFI_TRANSFER_FAIL_CUH_

#include <cstdint>

#include "xla_ffi/transfer/fabric.h"
#include "xla_ffi/transport/device_group.h"

namespace topoep {

// Leaves the first failure of this rank where the host finds it, and ends the kernel.
__device__ inline void Fail(const FailurePlace& place, int64_t word, int64_t peer, int64_t value) {
  if (atomicCAS(place.taken, 0, 1) != 0) {
    while (true) __nanosleep(1000);  // for the thread that came first to leave its record and to end the kernel
  }
  *place.record = Failure{0, word, peer, value};
  __threadfence_system();
  *static_cast<volatile int64_t*>(&place.record->failed) = 1;
  __threadfence_system();
  __trap();
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_TRANSFER_FAIL_CUH_
