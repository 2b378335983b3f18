// Working memory of the planner on a device: tables, then the workspace. It is laid out on the host, in the same way
// for the program that reserves it and for the handler that uses it.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/solve.h"

namespace topoep {

// put(pointer, count) for all that a problem points to in memory of the host, and that a device must find in its own.
template <class Put>
void ForTables(Problem& problem, Domains& domains, Put put) {
  put(problem.domain_of_rank, problem.num_ranks);
  if (problem.cost.rank_speed != nullptr) put(problem.cost.rank_speed, problem.num_ranks);
  put(domains.begin, problem.num_domains + 1);
  put(domains.ranks, problem.num_ranks);
  put(domains.position, problem.num_ranks);
  put(problem.effort.candidates, problem.effort.num_candidates);
  put(problem.effort.thrifty, problem.effort.num_thrifty);
  put(problem.effort.eager, problem.effort.num_eager);
}

// Points them to parts of the arena instead.
inline Problem MoveTables(Problem problem, Domains& domains, Arena& arena) {
  ForTables(problem, domains, [&arena](auto*& table, int32_t count) {
    table = arena.Take<std::remove_reference_t<decltype(*table)>>(count);
  });
  return problem;
}

// The bytes of the tables as they must lie on the device.
inline std::vector<std::byte> PackTables(Problem problem, Domains domains) {
  std::vector<std::byte> bytes;
  Arena measure;
  ForTables(problem, domains, [&](const auto* table, int32_t count) {
    const int64_t at = measure.Used();
    measure.Take<std::remove_reference_t<decltype(*table)>>(count);
    bytes.resize(measure.Used());
    std::copy_n(reinterpret_cast<const std::byte*>(table), count * sizeof(*table), bytes.data() + at);
  });
  return bytes;
}

// `base`, at a multiple of Arena::kAlignment, may be memory of a device, which is not touched; nullptr only measures.
struct Scratch {
  static constexpr int64_t kMaxBlocks = 128;  // that run side by side: GPUs have as many processors
  static constexpr int64_t kMaxBytesOfBlocks = int64_t{64} << 20;  // unless one block alone needs more

  Scratch(const Problem& host, const Domains& on_host, void* base) : Scratch(host, on_host, Arena(base)) {}

  // As the device sees them; `work.context.problem` is still to be set there.
  Domains domains;
  Problem problem;
  int32_t blocks;
  Workspace work;
  int64_t bytes;

 private:
  Scratch(const Problem& host, const Domains& on_host, Arena arena)
      : domains(on_host),
        problem(MoveTables(host, domains, arena)),
        blocks(NumBlocks(host, on_host)),
        work(host, on_host, blocks, arena),
        bytes(arena.Used()) {
    work.context.problem = nullptr;
    work.context.domains = domains;
  }

  static int32_t NumBlocks(const Problem& problem, const Domains& domains) {
    Arena measure;
    const Workspace one(problem, domains, 1, measure);
    const int64_t most = std::min<int64_t>(one.NumRuns(), kMaxBlocks);
    return static_cast<int32_t>(std::clamp(kMaxBytesOfBlocks / one.memory_bytes, int64_t{1}, most));
  }
};

// Bytes of device memory that the kernels work in; of the problem only its sizes and tables are read.
inline int64_t PlanScratchBytes(const Problem& problem) {
  const DomainTable domains(problem);
  return Scratch(problem, domains.View(), nullptr).bytes;
}

}  // namespace topoep
