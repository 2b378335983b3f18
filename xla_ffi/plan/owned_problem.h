// A planning problem that owns what it points to, and its attributes: how Python passes one, to every program here.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "xla_ffi/plan/problem.h"

namespace topoep {

struct OwnedProblem {
  // Without demand. Valid until this moves or changes.
  Problem View() const {
    Problem view = sizes;
    view.num_ranks = static_cast<int32_t>(domain_of_rank.size());
    view.num_domains = 1 + *std::max_element(domain_of_rank.begin(), domain_of_rank.end());
    view.domain_of_rank = domain_of_rank.data();
    view.cost.rank_speed = rank_speed.empty() ? nullptr : rank_speed.data();
    view.effort.candidates = candidates.data();
    view.effort.num_candidates = static_cast<int32_t>(candidates.size());
    view.effort.thrifty = thrifty.data();
    view.effort.num_thrifty = static_cast<int32_t>(thrifty.size());
    view.effort.eager = eager.data();
    view.effort.num_eager = static_cast<int32_t>(eager.size());
    return view;
  }

  Problem sizes{};  // what points to nothing, and does not follow from the lists
  std::vector<int32_t> domain_of_rank, rank_speed, thrifty, eager;
  std::vector<Candidate> candidates;
};

// By name, as topoep_jax/_native.py writes them; a number is a list of one.
using Attributes = std::map<std::string, std::vector<int64_t>>;

// Empty, or what is wrong with the attributes in a sentence; `problem` is not to be used then.
std::string ReadProblem(const Attributes& attributes, OwnedProblem& problem);

}  // namespace topoep
