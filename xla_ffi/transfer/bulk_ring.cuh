// Bulk copies (TMA) by one thread: global -> shared -> global, so that one path serves peers' memory and own memory.
// A load ends at the mbarrier of its stage, a store with its bulk group. The ring stays full from one copy to the next;
// Drain() ends them all. Inline PTX, because CUDA 12.4's headers do not wrap these instructions yet.

#pragma once

#include <cstdint>

namespace topoep {

// Orders what this thread sees or wrote through ordinary accesses and what bulk copies read or wrote.
__device__ inline void FenceBulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

class BulkRing {
 public:
  static constexpr int32_t kStages = 6;
  static constexpr int32_t kStores = 2;  // stages that are being written out while the others are being filled
  static constexpr int32_t kLoads = kStages - kStores;
  static constexpr int32_t kStageBytes = 16384;

  // Dynamic shared memory of the block.
  struct Memory {
    alignas(128) char data[kStages][kStageBytes];
    uint64_t full[kStages];
    char* target[kStages];
    uint32_t bytes[kStages];
  };

  // Called by every thread of the block, before a barrier.
  __device__ explicit BulkRing(Memory& memory) : memory_(memory) {
    if (threadIdx.x != 0) return;
    for (uint64_t& full : memory.full) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Shared(&full)) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    FenceBulk();
  }

  // The rest is called by thread 0 alone. Addresses and `bytes` are multiples of 16.
  __device__ void Copy(char* target, const char* source, int64_t bytes) {
    FenceBulk();  // for what this thread has just acquired
    for (int64_t at = 0; at < bytes; at += kStageBytes) {
      if (loaded_ - stored_ == kLoads) Store();
      Load(target + at, source + at, static_cast<uint32_t>(bytes - at < kStageBytes ? bytes - at : kStageBytes));
    }
  }

  // Everything has arrived, for this thread's ordinary accesses and for those ordered after them.
  __device__ void Drain() {
    while (stored_ != loaded_) Store();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    FenceBulk();
  }

 private:
  __device__ static uint32_t Shared(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  }

  __device__ void Load(char* target, const char* source, uint32_t bytes) {
    const uint32_t stage = loaded_ % kStages;
    // The stage's last store was followed by at least kStores others: all but those have left shared memory.
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStores) : "memory");
    const uint32_t full = Shared(&memory_.full[stage]);
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     Shared(memory_.data[stage])),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(full)
                 : "memory");
    memory_.target[stage] = target;
    memory_.bytes[stage] = bytes;
    ++loaded_;
  }

  __device__ void Store() {
    const uint32_t stage = stored_ % kStages;
    const uint32_t parity = stored_ / kStages % 2;
    uint32_t full = 0;
    while (full == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(full)
          : "r"(Shared(&memory_.full[stage])), "r"(parity)
          : "memory");
    }
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(memory_.target[stage])),
                 "r"(Shared(memory_.data[stage])), "r"(memory_.bytes[stage])
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    ++stored_;
  }

  Memory& memory_;
  uint32_t loaded_ = 0;  // stages so far, of thread 0
  uint32_t stored_ = 0;
};

}  // namespace topoep
