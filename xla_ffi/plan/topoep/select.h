// Which remote experts each domain serves itself; topoep_jax/plan/topoep/select.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"

namespace topoep {

struct Selection {
  TOPOEP_BODY Selection(const Context& context, Arena& arena) : width(context.largest_domain * context.slots) {
    arena.Take(int64_t{context.num_domains} * width, &selected);
    arena.Take(context.num_domains, &count, &domain_rows);
    arena.Take(context.experts, &home_rows);
    arena.Take(int64_t{context.num_domains} * context.experts, &served, &scan);
  }

  int32_t width;         // slots of the largest domain
  int32_t* selected;     // [M, width] experts, best first
  int32_t* count;        // [M]
  int32_t* served;       // [M, E] whether the domain serves a remote expert itself
  int64_t* home_rows;    // [E] rows that stay with the main's domain
  int64_t* domain_rows;  // [M] rows executed in the domain
  int64_t* scan;         // [M, E]
};

// Two dependent steps.
template <class Team>
TOPOEP_STAGE void Select(Team& team, const Context& context, const Candidate& candidate, const Selection& selection) {
  const int32_t pairs = context.num_domains * context.experts;
  const int64_t stays = candidate.inbound == 0 ? -1 : context.MeanInbound() * candidate.inbound / kSixteenths;
  const auto limit = [&](int32_t domain) {
    return CeilDiv(candidate.sixteenths * context.domains.Size(domain) * context.slots, kSixteenths);
  };
  const auto chosen = [&](int32_t domain, int32_t at) {
    const int32_t expert = context.ranked[context.At(domain, at)];
    if (expert < 0) return false;
    const int64_t pair = context.At(domain, expert);
    return (candidate.own < 0 || context.place[pair] < candidate.own) &&
           context.inbound[expert / context.mains] - context.before[pair] > stays;
  };
  const auto serves = [&](int32_t domain, int32_t expert) {
    const int32_t at = context.ranking[context.At(domain, expert)];
    return at >= 0 && chosen(domain, at) && selection.scan[context.At(domain, at)] < limit(domain);
  };
  team.ForEach(context.num_domains, [&](int32_t d) {
    selection.count[d] = 0;
    selection.domain_rows[d] = 0;
  });
  team.ScanEach(
      context.num_domains, context.experts, [&](int32_t d, int32_t at) { return int64_t{chosen(d, at)}; },
      selection.scan);
  team.ForEach(pairs, [&](int32_t i) {
    const int32_t domain = i / context.experts;
    const int32_t expert = i % context.experts;
    selection.served[i] = serves(domain, expert);
    if (!selection.served[i]) return;
    const int64_t at = selection.scan[context.At(domain, context.ranking[i])];
    selection.selected[int64_t{domain} * selection.width + at] = expert;
    team.Add(&selection.count[domain], 1);
    team.Add(&selection.domain_rows[domain], context.demand[i]);
  });
  team.ForEach(context.experts, [&](int32_t expert) {
    const int64_t rows = context.total[expert] - Sum(context.num_domains, [&](int32_t d) {
                           return serves(d, expert) ? context.demand[context.At(d, expert)] : 0;
                         });
    selection.home_rows[expert] = rows;
    team.Add(&selection.domain_rows[context.Home(expert)], rows);
  });
  team.Sync();
}

}  // namespace topoep
