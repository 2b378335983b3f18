// Solves one problem again and again where the planner is to be checked: on the GPU, or on a dry run on the host.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/gpu/problem_file.h"

namespace topoep {

class PlanRunner {
 public:
  explicit PlanRunner(const StoredProblem& stored);
  ~PlanRunner();

  // The plan, into memory that held other values before; working memory holds what the last call left, or `fill`.
  Answer Solve(uint8_t fill);

  // Microseconds of each of `runs` plans, after `warmups` more; the host does not wait in between. `graph`: each is a
  // replay of a recorded CUDA graph.
  std::vector<float> Times(int32_t warmups, int32_t runs, bool graph);

 private:
  struct Memory;

  std::unique_ptr<Memory> memory_;
};

}  // namespace topoep
