// Planning problems and their right answers, as tools/gpu_check/problems.py writes them.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/plan/owned_problem.h"

namespace topoep {

// A plan that owns its memory.
struct Answer {
  std::vector<int32_t> slot_expert, quota, rank_load, predicted_ps, status;
};

// A problem with its demand.
struct StoredProblem : OwnedProblem {
  Problem View() const;

  std::vector<int32_t> omega;
  Answer right;
};

// Exits with a message where the file cannot be read.
std::vector<StoredProblem> ReadProblems(const std::string& path);

}  // namespace topoep
