// What moves replica parameters and gradients between ranks. A transfer body (pull.h, push.h) is a template over its
// Fabric, as a planner's body is over its Team, and reaches other ranks only through the members below.
//
// A Fabric is one *worker* of one rank: a CUDA block, whose threads all make the same calls, or a host thread. A rank
// has W workers that run side by side; all workers of all ranks must be able to run at the same time.
//
//   Rank() NumRanks() Worker() NumWorkers()
//   State()           this rank's RankState, shared by its workers, kept from call to call
//   CanGet(peer)      Get() from this peer works, and Get() from here works for the peer: the two sides of a pair give
//                     the same answer, and always the same. Not asked about the own rank
//   CanGetAll()       it works for every pair: then nobody asks CanGet(), puts parameters or waits for those who do
//   Local(window, at) own memory of a window
//   Get(peer, from, from_at, to, to_at, bytes)
//                     bytes of the peer's window `from` -> own window `to`. Positions and bytes are multiples of 16
//   Put(peer, source, to, to_at, bytes)
//                     own memory -> the peer's window `to`. `to_at` is a multiple of 16; `source` (any own memory) and
//                     `bytes` may be odd. A fabric whose NIC reads only windows sends through its window kBounce, of
//                     which each worker has one part: two calls of a rank must not run at the same time
//   Copy(target, source, bytes)
//                     inside own memory, at any address
//   Flush()           ends what this worker started: what it got or copied is there, for itself and for who learns of
//                     it through a later Arrive() or Signal(); sources of its puts may change. A put need not have
//                     landed: that is Signal()'s business
//   Arrive(counter)   acquire and release among this rank's workers; true for the last of the W that call it, which
//                     then is ordered after everything that all W did (Flush() included) before. Each worker calls it
//                     equally often, and never twice before all have called it once
//   Signal(word, value)
//                     release. value(peer) for every peer: where it is not 0, the peer's words [word][this rank] are
//                     set to it. Whoever acquires the value sees all that happened before: what this worker did, what
//                     it was ordered after by Arrive(), and all *puts* of those workers to that peer. So puts and
//                     signals to one peer must share one ordered channel, whichever worker makes them. Values only
//                     grow. Peers include the own rank
//   Wait(word, peer, value)
//                     acquire, until own words [word][peer] are at least `value`
//   WaitAll(word, value)
//                     the same for every peer with value(peer) != 0, side by side
//                     Both: false when the time-out has passed, after {word, peer, value} was recorded. A body then
//                     returns at once. A device may trap instead, as a kernel returns nothing
//   ForEach(n, f)     f(i) for i in 0..n-1, dealt to the worker's threads; what one call wrote is there for the next
//                     only on the same i
//
// Nothing here knows of experts, so that kernels that move tokens can use it too: they add windows and words.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// Symmetric memory: as large and laid out in the same way on every rank; sizes in windows.h.
enum Window : int32_t {
  kMains,    // [Em, pitch], parameters of own experts that others read
  kSlots,    // [N, pitch], parameters of the experts held in slots
  kStripes,  // slices of experts of the own domain, to be sent on
  kStaging,  // two halves, in which replicas' gradients arrive
  kSignals,  // int64 [kNumWords, R]: [word][peer] was sent by the peer
  kBounce,   // of the fabric itself; see Put()
  kNumWindows
};

// Words of a rank, each set by one peer alone. Their values are Stamp()s.
enum Word : int32_t {
  kOpen,     // the peer's windows may be written in this pull
  kReady,    // the peer has what it sends in a hop
  kArrived,  // all that the peer pushes in a hop has been put here
  kDone,     // the peer has read all that it wanted in this pull
  kCredit,   // pieces of gradients that may be put into the peer's staging
  kPushed,   // pieces of gradients that the peer has put here
  kNumWords
};

inline constexpr int32_t kMaxHops = 3;

// Counters of Arrive(), one for each place: a counter serves two places only where none can be in both.
enum Counter : int32_t {
  kPublished,                             // the mains are in their window
  kPutInHop,                              // + hop
  kHopEnded = kPutInHop + kMaxHops,       // + hop
  kPullEnded = kHopEnded + kMaxHops - 1,  // after the last hop
  kPieceSent,                             // + piece % 2
  kPieceAdded = kPieceSent + 2,           // + piece % 2
  kPushEnded = kPieceAdded + 2,
  kNumCounters
};

// Calls are numbered from 1, pulls and pushes apart; a step is a hop or a number of pieces.
inline constexpr int32_t kStepBits = 28;
inline constexpr int64_t kMaxSteps = (int64_t{1} << kStepBits) - 1;
TOPOEP_BODY inline int64_t Stamp(int64_t epoch, int64_t step) { return epoch << kStepBits | step; }
TOPOEP_BODY inline int64_t EpochOf(int64_t stamp) { return stamp >> kStepBits; }
TOPOEP_BODY inline int64_t StepOf(int64_t stamp) { return stamp & kMaxSteps; }

// What a rank remembers between calls; all zero before the first. On a device it lies in device memory, so that a
// replayed graph counts on.
struct RankState {
  int64_t* pulls;         // [1] calls that ended
  int64_t* pushes;        // [1]
  int64_t* arrivals;      // [kNumCounters], of Arrive()
  int64_t* must_be_done;  // [R], least value of kDone of each peer before this rank's windows may change
  int64_t* sent;          // [kNumWords, R], the last value signalled to each peer, for fabrics that can only add

  RankState() = default;
  TOPOEP_BODY RankState(int32_t num_ranks, Arena& arena)
      : pulls(arena.Take<int64_t>(1)),
        pushes(arena.Take<int64_t>(1)),
        arrivals(arena.Take<int64_t>(kNumCounters)),
        must_be_done(arena.Take<int64_t>(num_ranks)),
        sent(arena.Take<int64_t>(int64_t{kNumWords} * num_ranks)) {}
};

// The wait that ran out of time. Plain words, so that a device can leave them in pinned memory before it traps.
struct Failure {
  int64_t failed;  // 0: none
  int64_t word;    // or, on a device, what device_group.h adds
  int64_t peer;
  int64_t value;  // that the peer did not send
};

}  // namespace topoep
