// What every candidate reads; topoep_jax/plan/topoep/context.py is the same in NumPy.

#pragma once

#include <algorithm>
#include <cstdint>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/cost.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/problem.h"
#include "xla_ffi/team/team.h"

namespace topoep {

inline constexpr int64_t kNotAPair = -1;  // below the rows of any pair

struct Context {
  Context(const Problem& problem_in, Domains domains_in, Arena& arena)
      : problem(&problem_in),
        domains(domains_in),
        ranks(problem_in.num_ranks),
        experts(problem_in.num_experts),
        slots(problem_in.num_slots),
        mains(problem_in.MainsPerRank()),
        instances(problem_in.InstancesPerRank()),
        num_domains(problem_in.num_domains) {
    arena.Take(3, &sums);
    arena.Take(experts, &total);
    arena.Take(ranks, &inbound);
    arena.Take(int64_t{num_domains} * experts, &demand, &key, &before, &place, &ranked, &ranking);
    for (int32_t d = 0; d < num_domains; ++d) largest_domain = std::max(largest_domain, domains.Size(d));
    for (int32_t r = 0; r < ranks; ++r) all_speeds += Speed(r);
  }

  TOPOEP_BODY int64_t Speed(int32_t rank) const {
    return problem->cost.rank_speed == nullptr ? kNominalSpeed : problem->cost.rank_speed[rank];
  }
  // Rows of a nominal rank if load were even.
  TOPOEP_BODY int64_t Fair() const { return CeilDiv(sums[0] * kNominalSpeed, all_speeds); }
  TOPOEP_BODY int64_t MeanInbound() const { return sums[1] / ranks; }
  // Rows that `rank` executes in the time in which a nominal rank executes `rows`, and the inverse.
  TOPOEP_BODY int64_t Share(int32_t rank, int64_t rows) const { return rows * Speed(rank) / kNominalSpeed; }
  TOPOEP_BODY int64_t Level(int32_t rank, int64_t rows) const { return CeilDiv(rows * kNominalSpeed, Speed(rank)); }
  TOPOEP_BODY int32_t DomainOf(int32_t rank) const { return problem->domain_of_rank[rank]; }
  TOPOEP_BODY int32_t Home(int32_t expert) const { return problem->DomainOfExpert(expert); }
  TOPOEP_BODY int32_t Omega(int32_t source, int32_t expert) const {
    return problem->omega[int64_t{source} * experts + expert];
  }
  // An item is an instance by r * J + j.
  TOPOEP_BODY int32_t MainItem(int32_t expert) const { return expert / mains * instances + expert % mains; }
  TOPOEP_BODY int64_t At(int32_t domain, int32_t expert) const { return int64_t{domain} * experts + expert; }
  // Law 4: a replica in a domain that is not its main's costs less to pull than the domain's rows cost to send.
  TOPOEP_BODY bool Pays(int32_t domain, int32_t expert) const {
    return Home(expert) != domain &&
           2 * demand[At(domain, expert)] * problem->cost.token_bytes > problem->cost.expert_bytes;
  }
  TOPOEP_BODY bool MayHold(int32_t rank, int32_t expert) const {
    return Home(expert) == DomainOf(rank) || Pays(DomainOf(rank), expert);
  }

  const Problem* problem;
  Domains domains;
  int32_t ranks;        // R
  int32_t experts;      // E
  int32_t slots;        // N
  int32_t mains;        // P
  int32_t instances;    // J
  int32_t num_domains;  // M
  int32_t largest_domain = 0;
  int64_t all_speeds = 0;
  int64_t* sums;     // [3] rows of all ranks; inbound rows of all ranks; entries of the demand that are negative
  int64_t* demand;   // [M, E]
  int64_t* key;      // [M, E] rows that serving the expert in the domain saves; kNotAPair where a copy does not pay
  int64_t* total;    // [E]
  int64_t* inbound;  // [R] rows that other domains send to a rank's mains
  int32_t* place;    // [M, E] of a pair among those of its main rank, best first; -1: not a pair
  int64_t* before;   // [M, E] rows of the better ones
  int32_t* ranked;   // [M, E] remote experts of a domain, best first, then -1
  int32_t* ranking;  // [M, E] where an expert stands there; -1: nowhere
};

// What it writes is seen after the next barrier.
template <class Team>
TOPOEP_STAGE void Prepare(Team& team, const Context& context) {
  const Problem& problem = *context.problem;
  const int32_t pairs = context.num_domains * context.experts;
  team.ForEach(pairs, [&](int32_t i) {
    const int32_t domain = i / context.experts;
    const int32_t expert = i % context.experts;
    context.demand[i] = Sum(context.domains.Size(domain),
                            [&](int32_t at) { return context.Omega(context.domains.Rank(domain, at), expert); });
    context.key[i] = context.Pays(domain, expert) ? context.demand[i] : kNotAPair;
    context.ranked[i] = -1;
  });
  team.ForEach(3, [&](int32_t i) { context.sums[i] = 0; });
  team.Sync();
  team.ForEach(context.ranks * context.experts, [&](int32_t i) {
    if (problem.omega[i] < 0) team.Add(&context.sums[2], int64_t{1});
  });
  team.ForEach(context.experts, [&](int32_t expert) {
    context.total[expert] = Sum(context.num_domains, [&](int32_t d) { return context.demand[context.At(d, expert)]; });
  });
  // A lane for each pair counts the better ones at its main rank and in its domain.
  team.ForEach(pairs, [&](int32_t i) {
    const int32_t domain = i / context.experts;
    const int32_t expert = i % context.experts;
    context.place[i] = -1;
    context.before[i] = 0;
    context.ranking[i] = -1;
    if (context.key[i] < 0) return;
    int32_t place = 0;
    int64_t before = 0;
    const int32_t first_main = expert / context.mains * context.mains;
    for (int32_t d = 0; d < context.num_domains; ++d) {
      for (int32_t e = first_main; e < first_main + context.mains; ++e) {
        const int64_t other = context.At(d, e);
        if (!IsLess(context.key[i], context.key[other], other, i)) continue;
        ++place;
        before += context.demand[other];
      }
    }
    const int64_t* keys = context.key + context.At(domain, 0);
    int32_t rank_in_domain = 0;
    for (int32_t e = 0; e < expert; ++e) rank_in_domain += keys[e] >= keys[expert];
    for (int32_t e = expert + 1; e < context.experts; ++e) rank_in_domain += keys[e] > keys[expert];
    context.place[i] = place;
    context.before[i] = before;
    context.ranking[i] = rank_in_domain;
    context.ranked[context.At(domain, rank_in_domain)] = expert;
  });
  team.ForEach(context.ranks, [&](int32_t rank) {
    int64_t rows = 0;
    int64_t inbound = 0;
    for (int32_t e = rank * context.mains; e < (rank + 1) * context.mains; ++e) {
      for (int32_t d = 0; d < context.num_domains; ++d) {
        rows += context.demand[context.At(d, e)];
        if (d != context.DomainOf(rank)) inbound += context.demand[context.At(d, e)];
      }
    }
    context.inbound[rank] = inbound;
    team.Add(&context.sums[0], rows);
    team.Add(&context.sums[1], inbound);
  });
}

}  // namespace topoep
