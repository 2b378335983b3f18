// Small random problems for planner `topoep`, and answers to compare.

#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <tuple>
#include <vector>

#include "xla_ffi/plan/owned_problem.h"

namespace topoep {

// A problem with demand.
struct Instance : OwnedProblem {
  Instance() {
    sizes.cap_rows = kNoCap;
    sizes.block_rows = 1;
    sizes.planner = Planner::kTopoep;
  }

  Problem View(int32_t threads) const {
    Problem view = OwnedProblem::View();
    view.omega = omega.data();
    view.num_threads = threads;
    return view;
  }

  std::vector<int32_t> omega;
};

// A plan that owns its memory, full of values that a planner must not leave there.
struct Answer {
  explicit Answer(const Problem& problem)
      : slot_expert(int64_t{problem.num_ranks} * problem.num_slots, 77),
        quota(problem.NumQuotas(), 77),
        rank_load(problem.num_ranks, 77),
        predicted_ps(2, 77),
        status(1, 77) {}

  Plan View() { return {slot_expert.data(), quota.data(), rank_load.data(), predicted_ps.data(), status.data()}; }

  std::vector<int32_t> slot_expert, quota, rank_load, predicted_ps, status;

  bool operator==(const Answer& other) const {
    return std::tie(slot_expert, quota, rank_load, predicted_ps, status) ==
           std::tie(other.slot_expert, other.quota, other.rank_load, other.predicted_ps, other.status);
  }
};

class Random {
 public:
  explicit Random(uint32_t seed) : rng_(seed) {}
  int operator()(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
  bool OneIn(int n) { return (*this)(1, n) == 1; }
  template <class T>
  void Shuffle(T& values) {
    std::shuffle(values.begin(), values.end(), rng_);
  }

 private:
  std::mt19937 rng_;
};

// Every option of the planner, each in a part of the instances.
inline Instance RandomInstance(uint32_t seed) {
  Random draw(seed);
  Instance instance;
  const int num_ranks = draw(1, 8);
  const int num_domains = draw(1, num_ranks);
  for (int r = 0; r < num_ranks; ++r) instance.domain_of_rank.push_back(r < num_domains ? r : draw(0, num_domains - 1));
  draw.Shuffle(instance.domain_of_rank);
  const int mains = draw(1, 4);
  instance.sizes.num_experts = num_ranks * mains;
  instance.sizes.num_slots = draw(0, std::min(3, instance.sizes.num_experts - mains));
  const int hot = draw(0, instance.sizes.num_experts - 1);
  const int sparse = draw(0, 3);
  int64_t total = 0;
  for (int i = 0; i < num_ranks * instance.sizes.num_experts; ++i) {
    const int rows = draw(0, 3) < sparse ? 0 : draw(0, 60);
    instance.omega.push_back(i % instance.sizes.num_experts == hot ? 20 * rows : rows);
    total += instance.omega.back();
  }
  instance.sizes.cost = CostModel{draw(1, 3000), draw(1, 8), draw(0, 200), draw(0, 20000), draw(0, 5000)};
  if (draw.OneIn(4)) instance.sizes.cost.instance_ps = draw(0, 3000);
  if (draw.OneIn(4)) instance.sizes.cost.tile_rows = draw(0, 16);
  if (draw.OneIn(4)) instance.sizes.cost.pulls = static_cast<Pulls>(draw(0, 3));
  if (draw.OneIn(4)) {
    for (int r = 0; r < num_ranks; ++r) instance.rank_speed.push_back(draw(500, 1500));
  }
  instance.sizes.block_rows = draw.OneIn(2) ? 1 : draw(2, 16);
  if (draw.OneIn(4)) instance.sizes.cap_rows = total / num_ranks + draw(0, static_cast<int>(total / num_ranks / 4 + 1));
  instance.sizes.objective = draw.OneIn(4) ? Objective::kEq8 : Objective::kBottleneck;

  instance.candidates = {{kUnlimited, 0, 0, -1, -1}};  // the empty plan
  const bool can_serve = instance.sizes.num_slots > 0 && num_ranks > 1;
  for (int c = draw(1, 4); c > 0; --c) {
    instance.candidates.push_back({draw.OneIn(2) ? kUnlimited : draw(1, 4), draw.OneIn(2) ? 0 : draw(1, 14),
                                   can_serve ? draw(0, 16) : 0, draw.OneIn(2) ? -1 : draw(0, 100),
                                   draw.OneIn(4) ? draw(0, 9) : -1});
  }
  for (int i = draw(0, 5); i > 0; --i) instance.thrifty.push_back(draw(0, 2));
  for (int i = draw(0, 5); i > 0; --i) instance.eager.push_back(draw(0, 2));
  instance.sizes.effort.fill_moves = draw(0, 6);
  instance.sizes.effort.paper = draw.OneIn(2);
  if (draw.OneIn(4)) {
    instance.sizes.effort.refine_changes = 40;
    instance.sizes.effort.refine_starts = 1;
    instance.sizes.effort.refine_waves = 1;
  }
  return instance;
}

}  // namespace topoep
