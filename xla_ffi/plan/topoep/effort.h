// How hard planner `topoep` searches; topoep_jax/plan/topoep/effort.py is the same in NumPy.

#pragma once

#include <cstdint>

namespace topoep {

inline constexpr int64_t kUnlimited = (int64_t{1} << 31) - 1;  // Candidate::own of a rank that may send any number
inline constexpr int64_t kNoSpread = -1;
inline constexpr int64_t kByIntervals = -1;  // Candidate::price
inline constexpr int64_t kSixteenths = 16;
inline constexpr int64_t kQuarters = 4;

// One setting of the search; topoep_jax/plan/topoep/effort.py says what each field means.
struct Candidate {
  int64_t own;         // copies that may leave one main rank for other domains; negative: any number
  int64_t inbound;     // inbound rows left at a main rank, in sixteenths of the mean; 0: none on purpose
  int64_t sixteenths;  // of a domain's slots for remote experts
  int64_t spread;      // permille above the fair load at which ranks spill over; negative: they do not
  int64_t price;       // of a pull in quarters of its own, for greedy spilling; negative: spill by intervals
};

enum class Kind : int32_t { kLoad = 0, kInbound = 1, kHome = 2 };

// How much to try; candidate 0 is the empty plan.
struct Effort {
  const Candidate* candidates;
  int32_t num_candidates;
  const int32_t* thrifty;  // kinds of the rounds that also count the mean traffic
  int32_t num_thrifty;
  const int32_t* eager;  // kinds of the rounds after them
  int32_t num_eager;
  int32_t fill_moves;
  bool paper;  // the paper's plan competes too
  // Where one slot can change in at most so many ways, the chosen plan and the cheapest ones are refined, one change a
  // wave.
  int64_t refine_changes;
  int32_t refine_starts;
  int32_t refine_waves;
};

}  // namespace topoep
