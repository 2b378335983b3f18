// Rows between ranks when a token crosses to a domain once: the exact replay of topoep_jax/plan/dedup.py.

#ifndef TOPOEP_XLA_FFI_PLAN_DEDUP_H_
#define TOPOEP_XLA_FFI_PLAN_DEDUP_H_

#include <cstdint>

#include "xla_ffi/plan/links.h"
#include "xla_ffi/plan/plan.h"
#include "xla_ffi/team/team.h"

namespace topoep {

// Working memory of the replay, in words; none is needed without de-duplication.
class ReplayState {
 public:
  TOPOEP_BODY static int64_t NumWords(const Problem& problem) {
    if (!problem.cost.dedup) return 0;
    return problem.num_experts + 1 + 2 * NumInstances(problem) +
           problem.num_ranks * (2 * int64_t{problem.num_experts} + problem.top_k);
  }

  TOPOEP_BODY ReplayState(const Problem& problem, int64_t* words)
      : begin(words),
        rank(begin + problem.num_experts + 1),
        instance(rank + NumInstances(problem)),
        at(instance + NumInstances(problem)),
        left(at + int64_t{problem.num_ranks} * problem.num_experts),
        runs_on(left + int64_t{problem.num_ranks} * problem.num_experts) {}

  TOPOEP_BODY static int64_t NumInstances(const Problem& problem) {
    return int64_t{problem.num_ranks} * problem.InstancesPerRank();
  }

  int64_t* begin;     // [E + 1] where the instances of an expert start in `rank` and `instance`
  int64_t* rank;      // [R x J] by expert, ascending rank within it
  int64_t* instance;  // [R x J]
  int64_t* at;        // [R, E] the instance whose turn it is, for each source
  int64_t* left;      // [R, E] rows that it still takes
  int64_t* runs_on;   // [R, K] where the assignments of one token run
};

// Adds to `bad` what contradicts: every source's tokens must hold each expert as often as omega says. The replay relies
// on it. `counts` is working memory; no dependent step.
template <class Team>
TOPOEP_BODY void CheckTokens(Team& team, const Problem& problem, int64_t* counts /* [R, E] */, int32_t* bad) {
  const int64_t per_rank = int64_t{problem.num_tokens} * problem.top_k;
  team.ForEach(problem.num_ranks, [&](int32_t source) {
    int64_t* count = counts + int64_t{source} * problem.num_experts;
    int32_t wrong = 0;
    for (int32_t e = 0; e < problem.num_experts; ++e) count[e] = 0;
    for (int64_t i = 0; i < per_rank; ++i) {
      const int32_t expert = problem.expert_idx[source * per_rank + i];
      if (expert < -1 || expert >= problem.num_experts)
        ++wrong;
      else if (expert >= 0)
        ++count[expert];
    }
    for (int32_t e = 0; e < problem.num_experts; ++e) {
      wrong += count[e] != problem.omega[int64_t{source} * problem.num_experts + e];
    }
    if (wrong > 0) team.Add(bad, 1);
  });
}

// Lists the instances of every expert, on one lane.
TOPOEP_BODY inline void ListInstances(const Problem& problem, const int32_t* slot_expert, const ReplayState& state) {
  const int32_t mains = problem.MainsPerRank();
  state.begin[0] = 0;
  for (int32_t e = 0; e < problem.num_experts; ++e) state.begin[e + 1] = 1;  // the main
  for (int32_t i = 0; i < problem.num_ranks * problem.num_slots; ++i) {
    if (slot_expert[i] >= 0) ++state.begin[slot_expert[i] + 1];
  }
  for (int32_t e = 0; e < problem.num_experts; ++e) state.begin[e + 1] += state.begin[e];
  // `at` of source 0 counts what is listed; it is set again before the replay.
  for (int32_t e = 0; e < problem.num_experts; ++e) state.at[e] = state.begin[e];
  for (int32_t r = 0; r < problem.num_ranks; ++r) {
    for (int32_t j = 0; j < problem.InstancesPerRank(); ++j) {
      const int32_t expert = j < mains ? r * mains + j : slot_expert[int64_t{r} * problem.num_slots + j - mains];
      if (expert < 0) continue;
      const int64_t place = state.at[expert]++;
      state.rank[place] = r;
      state.instance[place] = j;
    }
  }
}

// Adds the rows of one token, whose assignments run on runs_on[0..count-1].
template <class Team>
TOPOEP_BODY void AddToken(Team& team, const Problem& problem, int32_t source, const int64_t* runs_on, int32_t count,
                          int64_t row_bytes, const Links& links) {
  for (int32_t k = 0; k < count; ++k) {
    const int32_t rank = static_cast<int32_t>(runs_on[k]);
    const int32_t domain = problem.domain_of_rank[rank];
    bool seen = false;
    int32_t first = rank;
    for (int32_t other = 0; other < count; ++other) {
      const int32_t candidate = static_cast<int32_t>(runs_on[other]);
      seen |= other < k && candidate == rank;
      if (problem.domain_of_rank[candidate] == domain && candidate < first) first = candidate;
    }
    if (seen) continue;
    const bool enters = domain == problem.domain_of_rank[source] || first == rank;
    links.Add(team, enters ? source : first, rank, row_bytes);
  }
}

// Adds the rows of all tokens; each source is replayed in the order of its tokens, on one lane. omega and expert_idx
// must agree (CheckTokens). Two dependent steps, and the caller's barrier.
template <class Team>
TOPOEP_BODY void AddTokens(Team& team, const Problem& problem, const int32_t* slot_expert, const int32_t* quota,
                           int64_t row_bytes, const ReplayState& state, const Links& links) {
  team.Single([&] { ListInstances(problem, slot_expert, state); });
  team.Sync();
  team.ForEach(problem.num_ranks, [&](int32_t source) {
    int64_t* at = state.at + int64_t{source} * problem.num_experts;
    int64_t* left = state.left + int64_t{source} * problem.num_experts;
    int64_t* runs_on = state.runs_on + int64_t{source} * problem.top_k;
    const auto rows = [&](int64_t place) {
      return quota[problem.QuotaAt(source, static_cast<int32_t>(state.rank[place]),
                                   static_cast<int32_t>(state.instance[place]))];
    };
    for (int32_t e = 0; e < problem.num_experts; ++e) {
      at[e] = state.begin[e];
      left[e] = rows(at[e]);
    }
    for (int64_t token = 0; token < problem.num_tokens; ++token) {
      const int32_t* chosen = problem.expert_idx + (source * int64_t{problem.num_tokens} + token) * problem.top_k;
      int32_t count = 0;
      for (int32_t k = 0; k < problem.top_k; ++k) {
        const int32_t e = chosen[k];
        if (e < 0) continue;
        while (left[e] == 0 && at[e] + 1 < state.begin[e + 1]) left[e] = rows(++at[e]);
        --left[e];
        runs_on[count++] = state.rank[at[e]];
      }
      AddToken(team, problem, source, runs_on, count, row_bytes, links);
    }
  });
}

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_PLAN_DEDUP_H_
