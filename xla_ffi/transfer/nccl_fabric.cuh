// The Fabric of CUDA blocks over NCCL's windows: see fabric.h for what each member promises.
//
//                 ranks of the same LSA team               others (kNetwork)
//   Get           bulk copies from the peer's memory       GIN get
//   Put           bulk copies into the peer's memory       own memory -> kBounce, GIN put
//   Flush         all bulk copies have arrived             + see gin::Flush
//   Signal        store-release into the peer's kSignals   GIN signal, strong: after all puts on its context
//   Wait          load-acquire of own kSignals             load-acquire of the GIN signal
//
// Thread 0 does what is done once for a block. A group whose ranks are all in one LSA team runs kernels without GIN.

#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include <cstdint>
#include <cuda/atomic>

#include "xla_ffi/plan/math.h"
#include "xla_ffi/transfer/bulk_ring.cuh"
#include "xla_ffi/transfer/fabric.h"
#include "xla_ffi/transfer/windows.h"
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

// GIN, out of line: its code takes many registers, and copies inside the LSA team must not spill for it.
namespace gin {

// A context belongs to a pair of ranks, the same on both sides: signals count by context, and a strong signal follows
// the puts of all workers to its peer only where they share one.
__device__ inline int32_t ContextOf(const DeviceGroup& group, int32_t peer) {
  return (group.comm.rank + peer) % static_cast<int32_t>(group.comm.ginContextCount);
}

__device__ inline ncclGinSignal_t SignalOf(const DeviceGroup& group, int32_t word, int32_t sender) {
  return static_cast<ncclGinSignal_t>(word * group.comm.nRanks + sender);
}

__device__ __noinline__ void Get(const DeviceGroup& group, int32_t peer, Window from, int64_t from_at, Window to,
                                 int64_t to_at, int64_t bytes) {
  const ncclGin gin(group.comm, ContextOf(group, peer));
  gin.get(ncclTeamWorld(group.comm), peer, group.windows[from], from_at, group.windows[to], to_at, bytes);
}

__device__ __noinline__ void Put(const DeviceGroup& group, int32_t peer, int64_t bounce_at, Window to, int64_t to_at,
                                 int64_t bytes) {
  const ncclGin gin(group.comm, ContextOf(group, peer));
  gin.put(ncclTeamWorld(group.comm), peer, group.windows[to], to_at, group.windows[kBounce], bounce_at, bytes);
}

__device__ __noinline__ void Signal(const DeviceGroup& group, int32_t peer, int32_t word, int64_t increase) {
  const ncclGin gin(group.comm, ContextOf(group, peer));
  const ncclGin_StrongSignalAdd add{SignalOf(group, word, group.comm.rank), static_cast<uint64_t>(increase)};
  gin.signal(ncclTeamWorld(group.comm), peer, add, ncclCoopThread(), ncclGin_None(), cuda::thread_scope_thread,
             cuda::thread_scope_system);
}

__device__ __noinline__ int64_t Read(const DeviceGroup& group, int32_t peer, int32_t word) {
  const ncclGin gin(group.comm, ContextOf(group, peer));
  return static_cast<int64_t>(gin.readSignal(SignalOf(group, word, peer)));
}

// By the whole block: what it started on the context is complete. False when that takes longer than `cycles`.
//
// Gets need flushAsync() and wait(). The flush() that takes a time-out only polls for completions: on GDAKI that says
// that the NIC has finished a get, and not that the GPU sees its bytes, for which flushAsync() adds an operation. Where
// there are only puts (no backend but GDAKI is asked for gets) it is the other way round: the pair is empty on EFA, and
// completions are all that a put's source waits for.
__device__ __noinline__ bool Flush(const DeviceGroup& group, int32_t context, uint64_t cycles) {
  const ncclGin gin(group.comm, context);
  if (!group.network_gets) {
    const bool flushed = gin.flush(ncclCoopCta(), cuda::memory_order_acquire, ncclGin_None(), cycles) == ncclSuccess;
    return __syncthreads_and(flushed) != 0;
  }
  __syncthreads();  // thread 0 started the gets, and any thread may flush a peer's
  const ncclTeam world = ncclTeamWorld(group.comm);
  const int32_t first_near = group.comm.rank - group.comm.lsaRank;
  bool flushed = true;
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < group.comm.nRanks;
       peer += static_cast<int32_t>(blockDim.x)) {
    const bool near = first_near <= peer && peer < first_near + group.comm.lsaSize;
    if (near || ContextOf(group, peer) != context) continue;
    ncclGinRequest_t request;
    gin.flushAsync(world, peer, &request);
    flushed &= gin.wait(request, ncclCoopThread(), ncclGin_None(), cuda::memory_order_acquire, cycles) == ncclSuccess;
  }
  return __syncthreads_and(flushed) != 0;
}

}  // namespace gin

template <bool kNetwork>
class NcclFabric {
 public:
  // Called by every thread of the block; `ring` is its dynamic shared memory.
  __device__ NcclFabric(const DeviceGroup& group, BulkRing::Memory& ring) : group_(group), ring_(ring) {
    __syncthreads();
  }

  __device__ int32_t Rank() const { return group_.comm.rank; }
  __device__ int32_t NumRanks() const { return group_.comm.nRanks; }
  __device__ int32_t Worker() const { return static_cast<int32_t>(blockIdx.x); }
  __device__ int32_t NumWorkers() const { return static_cast<int32_t>(gridDim.x); }
  __device__ const RankState& State() const { return group_.state; }
  __device__ bool CanGet(int32_t peer) const { return IsNear(peer) || CanGetAll(); }
  __device__ bool CanGetAll() const { return !kNetwork || group_.network_gets != 0; }
  __device__ char* Local(Window window, int64_t at) const { return group_.local[window] + at; }

  __device__ void Get(int32_t peer, Window from, int64_t from_at, Window to, int64_t to_at, int64_t bytes) {
    if (IsNear(peer)) {
      if (threadIdx.x == 0) ring_.Copy(Local(to, to_at), Near(peer, from, from_at), bytes);
    } else if constexpr (kNetwork) {
      if (threadIdx.x == 0) gin::Get(group_, peer, from, from_at, to, to_at, bytes);
      MarkContext(peer);
    }
  }

  __device__ void Put(int32_t peer, const void* source, Window to, int64_t to_at, int64_t bytes) {
    if (IsNear(peer)) {
      Move(Near(peer, to, to_at), static_cast<const char*>(source), bytes);
    } else if constexpr (kNetwork) {
      // This worker's part of the bounce buffer serves one put at a time; other workers fill the network meanwhile.
      const int64_t room = RoundDown(group_.bytes[kBounce] / NumWorkers());
      const int64_t bounce_at = Worker() * room;
      for (int64_t at = 0; at < bytes; at += room) {
        const int64_t size = Min(bytes - at, room);
        if (contexts_ != 0) FlushNetwork();
        Move(Local(kBounce, bounce_at), static_cast<const char*>(source) + at, size);
        FlushBulk();
        if (threadIdx.x == 0) gin::Put(group_, peer, bounce_at, to, to_at + at, size);
        MarkContext(peer);
      }
    }
  }

  __device__ void Copy(void* target, const void* source, int64_t bytes) {
    Move(static_cast<char*>(target), static_cast<const char*>(source), bytes);
  }

  __device__ void Flush() {
    FlushBulk();
    if constexpr (kNetwork) FlushNetwork();
  }

  __device__ bool Arrive(Counter counter) {
    FenceBulk();  // what this thread wrote may be read by bulk copies of whoever learns of it
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
      const cuda::atomic_ref<int64_t, cuda::thread_scope_device> arrivals(State().arrivals[counter]);
      last = (arrivals.fetch_add(1, cuda::memory_order_acq_rel) + 1) % NumWorkers() == 0;
    }
    return __syncthreads_or(last) != 0;
  }

  template <class F>
  __device__ void Signal(Word word, F value) {
    FenceBulk();
    __syncthreads();
    for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < NumRanks(); peer += Threads()) {
      const int64_t stamp = value(peer);
      if (stamp == 0) continue;
      if (IsNear(peer)) {
        WordOf(Near(peer, kSignals, 0), word, Rank()).store(stamp, cuda::memory_order_release);
      } else if constexpr (kNetwork) {
        int64_t& sent = State().sent[int64_t{word} * NumRanks() + peer];
        gin::Signal(group_, peer, word, stamp - sent);
        sent = stamp;
      }
    }
  }

  __device__ bool Wait(Word word, int32_t peer, int64_t value) {
    if (threadIdx.x == 0) Await(word, peer, value);
    __syncthreads();
    return true;
  }

  template <class F>
  __device__ bool WaitAll(Word word, F value) {
    for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < NumRanks(); peer += Threads()) {
      const int64_t stamp = value(peer);
      if (stamp != 0) Await(word, peer, stamp);
    }
    __syncthreads();
    return true;
  }

  template <class F>
  __device__ void ForEach(int32_t n, F f) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < n; i += Threads()) f(i);
  }

 private:
  __device__ static int32_t Threads() { return static_cast<int32_t>(blockDim.x); }

  // LSA teams are blocks of neighbouring ranks.
  __device__ bool IsNear(int32_t peer) const {
    const int32_t index = LsaIndex(peer);
    return !kNetwork || (0 <= index && index < group_.comm.lsaSize);
  }

  __device__ int32_t LsaIndex(int32_t peer) const { return peer - group_.comm.rank + group_.comm.lsaRank; }

  __device__ char* Near(int32_t peer, Window window, int64_t at) const {
    return static_cast<char*>(ncclGetLsaPointer(group_.windows[window], at, LsaIndex(peer)));
  }

  __device__ cuda::atomic_ref<int64_t, cuda::thread_scope_system> WordOf(char* signals, int32_t word,
                                                                         int32_t sender) const {
    auto* words = reinterpret_cast<int64_t*>(signals);
    return cuda::atomic_ref<int64_t, cuda::thread_scope_system>(words[int64_t{word} * NumRanks() + sender]);
  }

  // Bulk copies where addresses allow them; all experts of real models do.
  __device__ void Move(char* target, const char* source, int64_t bytes) {
    const bool aligned = (reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source)) % kGrain == 0;
    const int64_t bulk = aligned ? RoundDown(bytes) : 0;
    if (threadIdx.x == 0) ring_.Copy(target, source, bulk);
    for (int64_t at = bulk + static_cast<int64_t>(threadIdx.x); at < bytes; at += Threads()) target[at] = source[at];
  }

  __device__ void FlushBulk() {
    if (threadIdx.x == 0) ring_.Drain();
    __syncthreads();
  }

  __device__ void MarkContext(int32_t peer) { contexts_ |= 1u << gin::ContextOf(group_, peer); }

  __device__ void FlushNetwork() {
    for (; contexts_ != 0; contexts_ &= contexts_ - 1) {
      const int32_t context = __ffs(static_cast<int32_t>(contexts_)) - 1;
      const uint64_t cycles = static_cast<uint64_t>(group_.timeout_ns) * 2;  // no clock is faster than 2 GHz by much
      if (!gin::Flush(group_, context, cycles)) Fail(group_.failures, kNetworkCopy, kNoPeer, 0);
    }
  }

  __device__ static int64_t Now() {
    int64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  }

  __device__ void Await(Word word, int32_t peer, int64_t value) {
    const int64_t end = Now() + group_.timeout_ns;
    while (Current(word, peer) < value) {
      if (Now() > end) Fail(group_.failures, word, peer, value);
    }
    FenceBulk();  // before bulk copies of what the peer wrote
  }

  __device__ int64_t Current(Word word, int32_t peer) {
    if constexpr (kNetwork) {
      if (!IsNear(peer)) return gin::Read(group_, peer, word);
    }
    return WordOf(Local(kSignals, 0), word, peer).load(cuda::memory_order_acquire);
  }

  const DeviceGroup& group_;
  BulkRing ring_;
  uint32_t contexts_ = 0;  // GIN contexts with something to flush, the same on every thread
};

}  // namespace topoep
