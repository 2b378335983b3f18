// Plain structs of one planning problem and its answer, without ownership; topoep_jax/plan/problem.py is the same in
// NumPy.
//
// R ranks, E experts, P = E/R mains per rank, N slots per rank, J = P + N instances per rank (mains first). Names and
// laws are those of topoep_jax/plan/types.py. Everything is row-major.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/team/team.h"

namespace topoep {

inline constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;  // of total demand: counts of rows fit int32
inline constexpr int64_t kMaxReplicas = int64_t{1} << 16;    // R x N: bounds the bytes of all pulls
inline constexpr int64_t kMaxInstances = 2 * kMaxReplicas;   // of one rank, where instances cost time or are padded
inline constexpr int64_t kNoCap = -1;
inline constexpr int64_t kNominalSpeed = 1000;   // permille
inline constexpr int64_t kMaxSpeed = 1'000'000;  // rows x speed fit 64 bits

enum class Planner : int64_t { kNone = 0, kTopoepPaper = 1, kTopoep = 2 };
enum class Objective : int64_t { kBottleneck = 0, kEq8 = 1 };

// How a replica's parameters travel; see topoep_jax/plan/pulls.py.
enum class Pulls : int64_t { kDirect = 0, kRelayed = 1, kStriped = 2, kBest = 3 };

enum Status : int32_t { kCapMet = 1, kEmpty = 2, kOverEmptyCost = 4, kBadInput = 8 };

// Bytes and rates; CostModel in topoep_jax/plan/cost.py bounds them so that 64-bit sums cannot overflow.
struct CostModel {
  int64_t expert_bytes;
  int64_t token_bytes;
  int64_t row_ps;
  int64_t inter_fs_per_byte;
  int64_t intra_fs_per_byte;
  int64_t instance_ps = 0;              // per active instance
  int64_t tile_rows = 0;                // rows of an instance are padded to this; 0: not at all
  const int32_t* rank_speed = nullptr;  // [R], permille of nominal speed; nullptr: all nominal
  Pulls pulls = Pulls::kDirect;
};

struct Problem {
  int32_t num_ranks;
  int32_t num_experts;  // a multiple of num_ranks
  int32_t num_slots;
  int32_t num_domains;
  const int32_t* domain_of_rank;  // [R], each in 0..num_domains-1; a domain may have no rank
  const int32_t* omega;           // [R, E], demand from source rank to expert
  CostModel cost;
  int64_t cap_rows;    // bound on the aligned rows of a rank, or kNoCap
  int64_t block_rows;  // >= 1
  Planner planner;
  Objective objective;
  Effort effort = {};       // read where the planner is kTopoep
  int32_t num_threads = 1;  // lanes of kTopoep; the plan does not depend on them

  TOPOEP_BODY int32_t MainsPerRank() const { return num_experts / num_ranks; }
  TOPOEP_BODY int32_t InstancesPerRank() const { return MainsPerRank() + num_slots; }
  TOPOEP_BODY int32_t MainRank(int32_t expert) const { return expert / MainsPerRank(); }
  TOPOEP_BODY int32_t DomainOfExpert(int32_t expert) const { return domain_of_rank[MainRank(expert)]; }
  TOPOEP_BODY int64_t NumQuotas() const { return int64_t{num_ranks} * num_ranks * InstancesPerRank(); }

  // Position of quota [source, rank, instance].
  TOPOEP_BODY int64_t QuotaAt(int32_t source, int32_t rank, int32_t instance) const {
    return (int64_t{source} * num_ranks + rank) * InstancesPerRank() + instance;
  }
};

// Memory of the answer, owned by the caller; Solve() writes every element.
struct Plan {
  int32_t* slot_expert;   // [R, N], ascending on each rank, then -1
  int32_t* quota;         // [R, R, J], (source, rank, instance)
  int32_t* rank_load;     // [R]
  int32_t* predicted_ps;  // [2], high and low word
  int32_t* status;        // [1], bits of Status
};

}  // namespace topoep
