// Planning problems and their right answers, as tools/gpu_check/problems.py writes them.

#ifndef TOPOEP_TOOLS_GPU_PROBLEM_FILE_H_
#define TOPOEP_TOOLS_GPU_PROBLEM_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/plan/problem.h"
#include "xla_ffi/plan/topoep/effort.h"

namespace topoep {

// A plan that owns its memory.
struct Answer {
  std::vector<int32_t> slot_expert, quota, rank_load, predicted_ps, status;
};

// A problem that owns its memory; View() stays valid as long as it does, and does not move.
struct StoredProblem {
  Problem View() const;

  std::vector<int64_t> sizes;  // in the order of problems.py
  std::vector<int32_t> domain_of_rank, rank_speed, thrifty, eager, omega;
  std::vector<Candidate> candidates;
  Effort effort{};
  Answer right;
};

// Exits with a message where the file cannot be read.
std::vector<StoredProblem> ReadProblems(const std::string& path);

}  // namespace topoep

#endif  // TOPOEP_TOOLS_GPU_PROBLEM_FILE_H_
