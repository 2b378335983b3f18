// Working memory of the planner on a device: tables, then the workspace. It is laid out on the host, in the same way
// for the program that reserves it and for the handler that uses it.

#ifndef TOPOEP_XLA_FFI_PLAN_SCRATCH_H_
#define TOPOEP_XLA_FFI_PLAN_SCRATCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/solve.h"
#include "xla_ffi/plan/topoep/effort.h"

namespace topoep {

// What a problem points to in the memory of the host, but a device must find in its own.
struct Tables {
  Tables(const Problem& problem, Arena& arena)
      : domain_of_rank(arena.Take<int32_t>(problem.num_ranks)),
        rank_speed(problem.cost.rank_speed == nullptr ? nullptr : arena.Take<int32_t>(problem.num_ranks)),
        begin(arena.Take<int32_t>(problem.num_domains + 1)),
        ranks(arena.Take<int32_t>(problem.num_ranks)),
        position(arena.Take<int32_t>(problem.num_ranks)),
        candidates(arena.Take<Candidate>(problem.effort.num_candidates)),
        thrifty(arena.Take<int32_t>(problem.effort.num_thrifty)),
        eager(arena.Take<int32_t>(problem.effort.num_eager)),
        bytes(arena.Used()) {}

  int32_t* domain_of_rank;  // [R]
  int32_t* rank_speed;      // [R], nullptr: all nominal
  int32_t* begin;           // of Domains
  int32_t* ranks;
  int32_t* position;
  Candidate* candidates;  // of Effort
  int32_t* thrifty;
  int32_t* eager;
  int64_t bytes;  // of all
};

// The bytes of the tables as they must lie on the device.
inline std::vector<std::byte> PackTables(const Problem& problem, const Domains& domains) {
  Arena measure;
  std::vector<std::byte> bytes(Tables(problem, measure).bytes);
  Arena arena(bytes.data());
  const Tables tables(problem, arena);
  const Effort& effort = problem.effort;
  std::copy_n(problem.domain_of_rank, problem.num_ranks, tables.domain_of_rank);
  if (tables.rank_speed != nullptr) std::copy_n(problem.cost.rank_speed, problem.num_ranks, tables.rank_speed);
  std::copy_n(domains.begin, problem.num_domains + 1, tables.begin);
  std::copy_n(domains.ranks, problem.num_ranks, tables.ranks);
  std::copy_n(domains.position, problem.num_ranks, tables.position);
  std::copy_n(effort.candidates, effort.num_candidates, tables.candidates);
  std::copy_n(effort.thrifty, effort.num_thrifty, tables.thrifty);
  std::copy_n(effort.eager, effort.num_eager, tables.eager);
  return bytes;
}

// `base`, at a multiple of Arena::kAlignment, may be memory of a device, which is not touched; nullptr only measures.
struct Scratch {
  static constexpr int64_t kMaxBlocks = 128;  // that run side by side: GPUs have as many processors
  static constexpr int64_t kMaxBytesOfBlocks = int64_t{64} << 20;  // unless one block alone needs more

  Scratch(const Problem& problem, const Domains& domains, void* base) : Scratch(problem, domains, Arena(base)) {}

  // The problem and its workspace as the device sees them; `context.problem` is still to be set there.
  Problem OnDevice(const Problem& problem) const {
    Problem result = problem;
    result.domain_of_rank = tables.domain_of_rank;
    result.cost.rank_speed = tables.rank_speed;
    result.effort.candidates = tables.candidates;
    result.effort.thrifty = tables.thrifty;
    result.effort.eager = tables.eager;
    return result;
  }
  Workspace WorkOnDevice() const {
    Workspace result = work;
    result.context.problem = nullptr;
    result.context.domains = {tables.begin, tables.ranks, tables.position};
    return result;
  }

  Tables tables;
  int32_t blocks;
  Workspace work;
  int64_t bytes;

 private:
  Scratch(const Problem& problem, const Domains& domains, Arena arena)
      : tables(problem, arena),
        blocks(NumBlocks(problem, domains)),
        work(problem, domains, blocks, arena),
        bytes(arena.Used()) {}

  static int32_t NumBlocks(const Problem& problem, const Domains& domains) {
    Arena measure;
    const Workspace one(problem, domains, 1, measure);
    const int64_t most = std::min<int64_t>(one.NumRuns(), kMaxBlocks);
    return static_cast<int32_t>(std::clamp(kMaxBytesOfBlocks / one.memory_bytes, int64_t{1}, most));
  }
};

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_SCRATCH_H_
