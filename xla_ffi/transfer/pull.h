// Brings the parameters of every occupied slot of a rank, by its PullSchedule: the body that the CUDA kernel and the
// host run alike. Memory protocol of call e (its epoch), seen from one rank; a *getter* of mine reads my windows, a
// *putter* is a rank from which Get() does not work and which therefore writes into mine:
//
//   1. wait kDone of those who read my windows in an earlier call. Then nobody reads them; and nobody writes them:
//      putters wait for kOpen of this call.
//   2. copy the mains that some slot holds into kMains; arrive. The last worker signals kOpen(e) to my putters, and
//      kReady(e, 0) to those who get from me in hop 0, and to this rank itself if it puts.
//   3. for every hop h:
//      a. put: wait kReady(e, h) of this rank and kOpen(e) of the target, put, flush, arrive; the last worker signals
//         kArrived(e, h) to the targets.
//      b. get: wait kReady(e, h) of the source, get. Then wait kArrived(e, h) of my putters.
//      c. flush, arrive; the last worker signals kReady(e, h + 1) to those who get from me in hop h + 1.
//   4. after the last hop, instead of c: flush, arrive; the last worker signals kDone(e) to those I got from, notes who
//      got from me, and counts the call.
//   5. copy out of kSlots what this worker brought.
//
// No deadlock: number the steps 1, 2, 3a(0), 3b(0), 3c(0), 3a(1), .. A wait in one step is for a signal that its sender
// gives at the end of an earlier step, when all workers of the sender passed that step; step 1 waits for the end of an
// earlier call. By induction every step ends on every rank, if all workers run.
//
// No byte of a window is written twice in a call (each byte of a replica is received once), and none is read before the
// signal that says it is there. A window changes again in the next call only after step 1; the next call of a rank
// starts when all its workers have left this one, which covers its own reads in step 5. Pushes use another window, but
// their puts may share the fabric's kBounce with ours: a pull and a push of one rank must not run at the same time.
//
// A worker brings the same part of every slot's row, whatever the slices, so that step 5 reads only what the worker
// itself got, or what a putter's signal announced.

#pragma once

#include <cstdint>

#include "xla_ffi/team/team.h"
#include "xla_ffi/transfer/fabric.h"
#include "xla_ffi/transfer/pull_schedule.h"
#include "xla_ffi/transfer/windows.h"

namespace topoep {

// One worker's view of one call.
template <class Fabric>
class PullCall {
 public:
  TOPOEP_BODY PullCall(Fabric& fabric, const PullSchedule& schedule, const char* mains, char* slots)
      : fabric_(fabric),
        s_(schedule),
        mains_(mains),
        slots_(slots),
        part_(PartOf(schedule.pitch, fabric.Worker(), fabric.NumWorkers())),
        num_hops_(*schedule.num_hops),
        epoch_(*fabric.State().pulls + 1) {}

  TOPOEP_BODY bool Run() {
    const int64_t* must_be_done = fabric_.State().must_be_done;
    if (!fabric_.WaitAll(kDone, [=](int32_t peer) { return must_be_done[peer]; })) return false;
    Publish();
    for (int32_t hop = 0; hop < num_hops_; ++hop) {
      if (!fabric_.CanGetAll() && !PutInHop(hop)) return false;
      if (!GetInHop(hop)) return false;
      fabric_.Flush();
      if (hop + 1 == num_hops_) {
        if (fabric_.Arrive(kPullEnded)) End();
      } else if (fabric_.Arrive(static_cast<Counter>(kHopEnded + hop))) {
        SignalReady(hop + 1);
      }
    }
    CopyOut();
    return true;
  }

 private:
  TOPOEP_BODY bool SendsTo(int32_t peer, int32_t hop) const { return s_.sends[hop * s_.num_ranks + peer] > 0; }
  TOPOEP_BODY bool GetsFrom(int32_t peer, int32_t hop) const { return s_.receives[hop * s_.num_ranks + peer] > 0; }
  TOPOEP_BODY bool SendsTo(int32_t peer) const { return SendsTo(peer, 0) || SendsTo(peer, 1) || SendsTo(peer, 2); }
  TOPOEP_BODY bool GetsFrom(int32_t peer) const { return GetsFrom(peer, 0) || GetsFrom(peer, 1) || GetsFrom(peer, 2); }

  TOPOEP_BODY void Publish() {
    const Range part = Intersection(part_, {0, s_.row_bytes});
    for (int32_t main = 0; main < s_.mains_per_rank; ++main) {
      if (s_.holders[s_.rank * s_.mains_per_rank + main] == 0) continue;
      fabric_.Copy(fabric_.Local(kMains, main * s_.pitch + part.begin), mains_ + main * s_.row_bytes + part.begin,
                   part.Size());
    }
    fabric_.Flush();
    if (!fabric_.Arrive(kPublished)) return;
    if (!fabric_.CanGetAll()) {
      fabric_.Signal(kOpen,
                     [this](int32_t peer) { return GetsFrom(peer) && !fabric_.CanGet(peer) ? Stamp(epoch_, 0) : 0; });
    }
    SignalReady(0);
  }

  // To those who get in this hop, and to this rank's own workers if they put.
  TOPOEP_BODY void SignalReady(int32_t hop) {
    fabric_.Signal(kReady, [this, hop](int32_t peer) {
      const bool told = peer == s_.rank ? !fabric_.CanGetAll() : SendsTo(peer, hop) && fabric_.CanGet(peer);
      return told ? Stamp(epoch_, hop) : 0;
    });
  }

  TOPOEP_BODY bool PutInHop(int32_t hop) {
    bool any = false;
    for (int32_t i = s_.outgoing_begin[hop]; i < s_.outgoing_begin[hop + 1]; ++i) {
      const Copy copy = s_.outgoing[i];
      if (fabric_.CanGet(copy.peer)) continue;
      if (!any && !fabric_.Wait(kReady, s_.rank, Stamp(epoch_, hop))) return false;
      any = true;
      if (!fabric_.Wait(kOpen, copy.peer, Stamp(epoch_, 0))) return false;
      const Range bytes = Share(copy);
      if (bytes.Size() == 0) continue;
      fabric_.Put(copy.peer, fabric_.Local(static_cast<Window>(copy.from), From(copy, bytes)),
                  static_cast<Window>(copy.to), To(copy, bytes), bytes.Size());
    }
    if (!any) return true;
    fabric_.Flush();
    if (fabric_.Arrive(static_cast<Counter>(kPutInHop + hop))) {
      fabric_.Signal(kArrived, [this, hop](int32_t peer) {
        return SendsTo(peer, hop) && !fabric_.CanGet(peer) ? Stamp(epoch_, hop) : 0;
      });
    }
    return true;
  }

  TOPOEP_BODY bool GetInHop(int32_t hop) {
    for (int32_t i = s_.incoming_begin[hop]; i < s_.incoming_begin[hop + 1]; ++i) {
      const Copy copy = s_.incoming[i];
      const Range bytes = Share(copy);
      if (bytes.Size() == 0 || !fabric_.CanGet(copy.peer)) continue;
      if (!fabric_.Wait(kReady, copy.peer, Stamp(epoch_, hop))) return false;
      fabric_.Get(copy.peer, static_cast<Window>(copy.from), From(copy, bytes), static_cast<Window>(copy.to),
                  To(copy, bytes), bytes.Size());
    }
    return fabric_.CanGetAll() || fabric_.WaitAll(kArrived, [this, hop](int32_t peer) {
      return GetsFrom(peer, hop) && !fabric_.CanGet(peer) ? Stamp(epoch_, hop) : 0;
    });
  }

  // By the last worker, which every other one has passed.
  TOPOEP_BODY void End() {
    fabric_.Signal(kDone,
                   [this](int32_t peer) { return GetsFrom(peer) && fabric_.CanGet(peer) ? Stamp(epoch_, 0) : 0; });
    const RankState state = fabric_.State();
    fabric_.ForEach(s_.num_ranks, [&](int32_t peer) {
      if (SendsTo(peer) && fabric_.CanGet(peer)) state.must_be_done[peer] = Stamp(epoch_, 0);
    });
    fabric_.ForEach(1, [&](int32_t) { *state.pulls = epoch_; });
  }

  TOPOEP_BODY void CopyOut() {
    const Range part = Intersection(part_, {0, s_.row_bytes});
    for (int32_t slot = 0; slot < s_.num_slots; ++slot) {
      if (s_.held[slot] < 0) continue;
      fabric_.Copy(slots_ + slot * s_.row_bytes + part.begin, fabric_.Local(kSlots, slot * s_.pitch + part.begin),
                   part.Size());
    }
    fabric_.Flush();
  }

  // The bytes of a copy, within the expert's row, that this worker moves.
  TOPOEP_BODY Range Share(const Copy& copy) const {
    const Range bytes = copy.Bytes(s_.pitch);
    if (copy.to == kSlots) return Intersection(bytes, part_);
    return PartOf(bytes, fabric_.Worker(), fabric_.NumWorkers());
  }

  TOPOEP_BODY int64_t From(const Copy& copy, Range bytes) const {
    return copy.Place(copy.from, copy.from_row, bytes.begin, s_.pitch);
  }
  TOPOEP_BODY int64_t To(const Copy& copy, Range bytes) const {
    return copy.Place(copy.to, copy.to_row, bytes.begin, s_.pitch);
  }

  Fabric& fabric_;
  const PullSchedule& s_;
  const char* mains_;
  char* slots_;
  Range part_;  // of every slot's row
  int32_t num_hops_;
  int64_t epoch_;
};

// Copies into the occupied rows of slots [N, row_bytes] the parameters of their experts; `mains` [Em, row_bytes] are
// this rank's. Every worker of every rank calls it, with schedules of the same plan. False after a time-out.
template <class Fabric>
TOPOEP_BODY bool PullReplicas(Fabric& fabric, const PullSchedule& schedule, const void* mains, void* slots) {
  PullCall<Fabric> call(fabric, schedule, static_cast<const char*>(mains), static_cast<char*>(slots));
  return call.Run();
}

}  // namespace topoep
