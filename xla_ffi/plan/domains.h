// The ranks of each domain, as arrays that any team can read.

#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/team.h"

namespace topoep {

struct Domains {
  const int32_t* begin;     // [M + 1], where each domain starts in `ranks`
  const int32_t* ranks;     // [R], by domain, ascending within it
  const int32_t* position;  // [R], of a rank in its own domain

  TOPOEP_BODY int32_t Size(int32_t domain) const { return begin[domain + 1] - begin[domain]; }
  TOPOEP_BODY int32_t Rank(int32_t domain, int32_t at) const { return ranks[begin[domain] + at]; }
};

// Owns what Domains shows; built once for each problem, on the host.
class DomainTable {
 public:
  explicit DomainTable(const Problem& problem)
      : begin_(problem.num_domains + 1), ranks_(problem.num_ranks), position_(problem.num_ranks) {
    for (int32_t r = 0; r < problem.num_ranks; ++r) ++begin_[problem.domain_of_rank[r] + 1];
    for (int32_t d = 0; d < problem.num_domains; ++d) begin_[d + 1] += begin_[d];
    std::vector<int32_t> size(problem.num_domains);
    for (int32_t r = 0; r < problem.num_ranks; ++r) {
      const int32_t domain = problem.domain_of_rank[r];
      position_[r] = size[domain]++;
      ranks_[begin_[domain] + position_[r]] = r;
    }
  }

  Domains View() const { return {begin_.data(), ranks_.data(), position_.data()}; }

 private:
  std::vector<int32_t> begin_;
  std::vector<int32_t> ranks_;
  std::vector<int32_t> position_;
};

}  // namespace topoep
