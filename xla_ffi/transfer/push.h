// Adds the gradients of every replica to its main's, in ascending (rank, slot) and in f32, by a PushSchedule: the body
// that the CUDA kernel and the host run alike. Memory protocol of call e, for pieces k = 0, 1, .. of the gradients:
//
//   0. the first worker of an owner signals kCredit(e, 2) to the ranks that hold its experts: both halves are free.
//   S(k). a holder waits for kCredit(e, k + 1) of each owner to which it has a piece k to send, puts it into half
//      k % 2 of the owner's staging, flushes, arrives; the last worker signals kPushed(e, k + 1) to these owners.
//   A(k). an owner waits for kPushed(e, k + 1) of its holders, adds the staged rows, arrives; the last worker signals
//      kCredit(e, k + 3): half k % 2 is free again.
//   E. after the last piece: arrive; the last worker counts the call.
//
// No deadlock: in the order 0, S(0), A(0), S(1), A(1), .., E each wait is for a signal given at the end of an earlier
// step: S(k) waits for step 0 or for A(k - 2) of the owner, A(k) for S(k) of the holders.
//
// A half is written by S(k) only after all workers of the owner have read it in A(k - 2), and in S(0), S(1) only after
// the owner entered this call, when all its workers had left the one before. Two counters of arrivals are enough for
// all pieces: a worker in S(k) passed a wait for kCredit(e, k + 1), which followed kPushed(e, k - 1), which all workers
// of its rank had arrived for; in the same way A(k) follows everybody's A(k - 2).
//
// Worker w adds columns of its own of every piece, so that the order of additions is the same on any number of workers.

#pragma once

#include <cstdint>

#include "xla_ffi/team/team.h"
#include "xla_ffi/transfer/fabric.h"
#include "xla_ffi/transfer/push_schedule.h"
#include "xla_ffi/transfer/windows.h"

namespace topoep {

// Neighbouring columns of a gradient.
template <int32_t n>
struct alignas(n * sizeof(float)) Floats {
  float at[n];

  TOPOEP_BODY void operator+=(Floats other) {  // by value: loaded as one
    for (int32_t i = 0; i < n; ++i) at[i] += other.at[i];
  }
};

// One worker's view of one call.
template <class Fabric>
class PushCall {
 public:
  TOPOEP_BODY PushCall(Fabric& fabric, const PushSchedule& schedule, const char* slot_grads, char* main_grads)
      : fabric_(fabric),
        s_(schedule),
        slot_grads_(slot_grads),
        main_grads_(main_grads),
        num_replicas_(schedule.replicas_of[schedule.rank]),
        piece_(num_replicas_ > 0 ? schedule.PieceOf(schedule.rank) : 0),
        epoch_(*fabric.State().pushes + 1) {}

  TOPOEP_BODY bool Run() {
    if (fabric_.Worker() == 0) SignalCredit(2);
    for (int64_t k = 0;; ++k) {
      bool sends = false;
      if (!Send(k, &sends)) return false;
      const bool adds = num_replicas_ > 0 && k * piece_ < s_.row_bytes;
      if (adds && !Add(k)) return false;
      if (!sends && !adds) break;  // there are fewer pieces for none than for some
    }
    if (fabric_.Arrive(kPushEnded)) {
      fabric_.ForEach(1, [&](int32_t) { *fabric_.State().pushes = epoch_; });
    }
    return true;
  }

 private:
  TOPOEP_BODY bool Has(const SlotGradient& slot, int64_t k) const {
    return slot.owner >= 0 && k * slot.piece < s_.row_bytes;
  }

  // This worker's bytes of piece k, within the gradient's row.
  TOPOEP_BODY Range Share(int64_t piece, int64_t k) const {
    const Range bytes = Intersection({k * piece, (k + 1) * piece}, {0, s_.row_bytes});
    return PartOf(bytes, fabric_.Worker(), fabric_.NumWorkers());
  }

  // Position of byte `at` of a gradient in the owner's staging.
  TOPOEP_BODY int64_t Place(int64_t piece, int32_t index, int64_t k, int64_t at) const {
    return k % 2 * s_.half_bytes + index * piece + at - k * piece;
  }

  TOPOEP_BODY void SignalCredit(int64_t pieces) {
    fabric_.Signal(kCredit, [this, pieces](int32_t peer) { return s_.from[peer] > 0 ? Stamp(epoch_, pieces) : 0; });
  }

  TOPOEP_BODY bool Send(int64_t k, bool* any) {
    for (int32_t i = 0; i < s_.num_slots; ++i) {
      const SlotGradient slot = s_.slots[i];
      if (!Has(slot, k)) continue;
      *any = true;
      if (!fabric_.Wait(kCredit, slot.owner, Stamp(epoch_, k + 1))) return false;
      const Range bytes = Share(slot.piece, k);
      if (bytes.Size() == 0) continue;
      fabric_.Put(slot.owner, slot_grads_ + i * s_.row_bytes + bytes.begin, kStaging,
                  Place(slot.piece, slot.index, k, bytes.begin), bytes.Size());
    }
    if (!*any) return true;
    fabric_.Flush();
    if (fabric_.Arrive(static_cast<Counter>(kPieceSent + k % 2))) {
      fabric_.Signal(kPushed, [this, k](int32_t peer) {
        for (int32_t i = 0; i < s_.num_slots; ++i) {
          if (s_.slots[i].owner == peer && Has(s_.slots[i], k)) return Stamp(epoch_, k + 1);
        }
        return int64_t{0};
      });
    }
    return true;
  }

  TOPOEP_BODY bool Add(int64_t k) {
    if (!fabric_.WaitAll(kPushed, [this, k](int32_t peer) { return s_.from[peer] > 0 ? Stamp(epoch_, k + 1) : 0; })) {
      return false;
    }
    const Range bytes = Share(piece_, k);
    const char* staged = fabric_.Local(kStaging, Place(piece_, 0, k, bytes.begin));
    char* sums = main_grads_ + bytes.begin;
    // Columns begin at multiples of kGrain; with rows of such a size, as of all real models, four are added at a time.
    if (s_.row_bytes % kGrain == 0 && reinterpret_cast<uintptr_t>(main_grads_) % kGrain == 0) {
      AddColumns<4>(bytes.Size(), staged, sums);
    } else {
      AddColumns<1>(bytes.Size(), staged, sums);
    }
    if (fabric_.Arrive(static_cast<Counter>(kPieceAdded + k % 2))) SignalCredit(k + 3);
    return true;
  }

  // A column of all mains belongs to one lane, which keeps a main's sum in registers while it adds the main's replicas
  // in ascending (rank, slot).
  template <int32_t n>
  TOPOEP_BODY void AddColumns(int64_t size, const char* staged, char* sums) {
    fabric_.ForEach(static_cast<int32_t>(size / static_cast<int64_t>(sizeof(Floats<n>))), [&](int32_t column) {
      for (int32_t first = 0; first < num_replicas_; ++first) {
        if (s_.replicas[first].first == 0) continue;
        Floats<n>* target = reinterpret_cast<Floats<n>*>(sums + s_.replicas[first].main * s_.row_bytes) + column;
        Floats<n> sum = *target;
        for (int32_t i = first; i >= 0; i = s_.replicas[i].next) {
          sum += reinterpret_cast<const Floats<n>*>(staged + i * piece_)[column];
        }
        *target = sum;
      }
    });
  }

  Fabric& fabric_;
  const PushSchedule& s_;
  const char* slot_grads_;
  char* main_grads_;
  int32_t num_replicas_;
  int64_t piece_;  // of this rank as an owner
  int64_t epoch_;
};

// Adds to main_grads [Em, row_bytes] of this rank the gradients of their replicas; slot_grads [N, row_bytes] are those
// of this rank's slots, f32 both, and rows of empty slots are not read. Every worker of every rank calls it, with
// schedules of the same plan. False after a time-out.
template <class Fabric>
TOPOEP_BODY bool PushGradients(Fabric& fabric, const PushSchedule& schedule, const float* slot_grads,
                               float* main_grads) {
  PushCall<Fabric> call(fabric, schedule, reinterpret_cast<const char*>(slot_grads),
                        reinterpret_cast<char*>(main_grads));
  return call.Run();
}

}  // namespace topoep
