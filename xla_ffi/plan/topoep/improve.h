// Rounds that move rows between a plan's instances; topoep_jax/plan/topoep/improve.py is the same in NumPy.

#pragma once

#include <cstdint>

#include "xla_ffi/plan/cost.h"
#include "xla_ffi/plan/finish.h"
#include "xla_ffi/plan/math.h"
#include "xla_ffi/plan/topoep/context.h"
#include "xla_ffi/plan/topoep/effort.h"
#include "xla_ffi/plan/topoep/measure.h"
#include "xla_ffi/plan/topoep/state.h"

namespace topoep {

// Of the mean rank's traffic between domains, which a thrifty phase adds to the objective.
inline constexpr int64_t kThriftyQuarters = 3;

struct Request {
  int64_t want;
  int32_t from;  // instance r * J + j
  int32_t to;    // instance of the rank that asks
};

struct ImproveMemory {
  TOPOEP_BODY ImproveMemory(const Context& context, Arena& arena)
      : measures{Measure(context, arena), Measure(context, arena), Measure(context, arena)}, holders(context, arena) {
    arena.Take(context.ranks, &request, &amount);
    arena.Take(int64_t{context.ranks} * context.ranks, &take);
    arena.Take(CostMemory::NumWords(*context.problem), &cost.words);
    arena.Take(Links::kNumBests, &cost.bests);
  }

  Measure measures[3];  // the plan as it is, as a round would make it, and one that a slow lane may still look at
  Holders holders;
  Request* request;  // [R]
  int64_t* amount;   // [R] rows granted to the rank's request
  int32_t* take;     // [R, R] of them from each source
  CostMemory cost;
};

// What a phase counts as the cost of a plan.
enum class Target { kThrifty, kEager, kLevel };

template <class Team>
class Improver {
 public:
  TOPOEP_BODY Improver(Team& team, const Context& context, const ImproveMemory& memory, const State& state)
      : team_(team), context_(context), problem_(*context.problem), memory_(memory), state_(state) {}

  // Lists the holders of each expert and measures the plan. Quotas and slots may still be written before it.
  TOPOEP_STAGE void Start() {
    team_.ForEach(context_.experts, [&](int32_t e) { memory_.holders.first[e] = -1; });
    team_.ForEach(Now().num_words, [&](int32_t i) { Now().words[i] = 0; });
    team_.Sync();
    ListHolders(team_, context_, state_, memory_.holders);
    Count(team_, context_, state_, Now());
    team_.Sync();
    FindBest(team_, context_, memory_.holders, Now());
  }

  // Runs the rounds, keeps those that lower the cost, and drops replicas left without rows. What it writes last, others
  // see after the next barrier.
  TOPOEP_STAGE void Run(Target target, const int32_t* kinds, int32_t num_kinds) {
    cost_ = CostOf(Now(), target);
    uint32_t failed = 0;  // kinds that changed nothing since the last change
    for (int32_t i = 0; i < num_kinds; ++i) {
      const uint32_t bit = uint32_t{1} << kinds[i];
      if (failed & bit) continue;
      failed = Round(target, static_cast<Kind>(kinds[i])) ? 0 : failed | bit;
    }
    ApplyPending();
    team_.ForEach(context_.ranks, [&](int32_t r) {
      for (int32_t n = 0; n < context_.slots; ++n) {
        const int32_t item = r * context_.instances + context_.mains + n;
        int32_t& expert = state_.slot_expert[r * context_.slots + n];
        // A free slot is not written again: without a round there was no barrier, and others may still read it.
        if (Now().rows[item] == 0 && expert >= 0) expert = -1;
      }
    });
  }

  TOPOEP_BODY const Measure& Now() const { return memory_.measures[now_]; }

  TOPOEP_BODY Worth NowWorth() {
    return {PredictedPs(), Now().Aligned(), Now().InterPulls() > 0 || Now().IntraPulls() > 0};
  }

  // Picoseconds of the plan as it is. Without dependent steps where each replica is pulled from its main.
  TOPOEP_BODY int64_t PredictedPs() {
    if (problem_.cost.pulls == Pulls::kDirect) return RowsPs(Now()) + PullsPs(Now());
    return PredictPs(team_, problem_, context_.domains, state_.slot_expert, state_.quota, memory_.cost);
  }

 private:
  // Compute and rows; pulls stay as they are during a phase.
  TOPOEP_BODY int64_t RowsPs(const Measure& measure) const {
    const int64_t row_bytes = 2 * problem_.cost.token_bytes;
    const bool eq8 = problem_.objective == Objective::kEq8;
    return measure.ComputePs() + LinksPs(problem_.cost, row_bytes * (eq8 ? measure.TotalInter() : measure.Inter()),
                                         row_bytes * (eq8 ? measure.TotalIntra() : measure.Intra()));
  }
  TOPOEP_BODY int64_t PullsPs(const Measure& measure) const {
    int64_t inter = measure.InterPulls();
    int64_t intra = measure.IntraPulls();
    if (problem_.objective == Objective::kEq8) {
      inter = intra = 0;
      for (int32_t slot = 0; slot < context_.ranks * context_.slots; ++slot) {
        inter += IsPulled(context_, memory_.holders, measure, true, slot);
        intra += IsPulled(context_, memory_.holders, measure, false, slot);
      }
    }
    return LinksPs(problem_.cost, problem_.cost.expert_bytes * inter, problem_.cost.expert_bytes * intra);
  }

  TOPOEP_BODY int64_t CostOf(const Measure& measure, Target target) const {
    if (target == Target::kLevel) return measure.Aligned();
    int64_t ps = RowsPs(measure);
    if (target == Target::kThrifty) {
      const int64_t mean_bytes = 2 * problem_.cost.token_bytes * (measure.TotalInter() / context_.ranks);
      ps += kThriftyQuarters * LinkPs(mean_bytes, problem_.cost.inter_fs_per_byte) / kQuarters;
    }
    return ps;
  }

  // Whether the round is kept. Three dependent steps; a round that grants nothing has two.
  TOPOEP_STAGE bool Round(Target target, Kind kind) {
    const int32_t then = 3 - now_ - before_;
    const Measure& now = Now();
    const Measure& next = memory_.measures[then];
    bound_ = target != Target::kLevel;
    kind_ = kind;
    const int64_t fair = context_.Fair();
    load_cut_ = bound_ ? fair + ((now.Level() - fair) >> 1) : fair;
    inter_cut_ = (now.TotalInter() / context_.ranks + now.Inter()) / 2;
    team_.ForEach(now.num_words, [&](int32_t i) { next.words[i] = now.words[i]; });
    ApplyPending();
    team_.ForEach(context_.ranks, [&](int32_t r) { memory_.request[r] = BestRequest(r); });
    team_.Sync();
    team_.ForEach(context_.ranks, [&](int32_t r) {
      memory_.amount[r] = Grant(r);
      Take(r, next);
    });
    team_.Sync();
    bool any = false;
    for (int32_t r = 0; r < context_.ranks; ++r) any |= memory_.amount[r] > 0;
    before_ = then;
    if (!any) return false;
    FindBest(team_, context_, memory_.holders, next);
    const int64_t cost = CostOf(next, target);
    if (cost >= cost_) return false;
    cost_ = cost;
    before_ = now_;
    now_ = then;
    pending_ = true;
    return true;
  }

  // Quotas follow the measure late: the lane that took the rows moves them, while nobody reads quotas. It may go on to
  // its next request without a barrier.
  TOPOEP_BODY void ApplyPending() {
    if (!pending_) return;
    pending_ = false;
    team_.ForEach(context_.ranks, [&](int32_t r) {
      if (memory_.amount[r] <= 0) return;
      const int32_t item = memory_.request[r].from;
      const int32_t* take = memory_.take + int64_t{r} * context_.ranks;
      for (int32_t s = 0; s < context_.ranks; ++s) {
        if (take[s] == 0) continue;
        team_.Add(state_.Quota(context_, s, item / context_.instances, item % context_.instances), -take[s]);
        team_.Add(state_.Quota(context_, s, r, memory_.request[r].to), take[s]);
      }
    });
  }

  TOPOEP_BODY int64_t Over(int32_t rank) const {
    const Measure& now = Now();
    if (kind_ == Kind::kLoad) return now.load[rank] - context_.Share(rank, load_cut_);
    if (kind_ == Kind::kInbound) return now.inter_in[rank] - inter_cut_;
    return now.inter_in[rank];
  }
  TOPOEP_BODY int64_t InterRoom(int32_t rank) const {
    if (!bound_) return kMaxRows;
    return Max((kind_ == Kind::kInbound ? inter_cut_ : Now().Inter()) - Now().inter_in[rank], 0);
  }

  // What rank r asks for: the most rows that one of its instances could take over from another of the same expert.
  TOPOEP_BODY Request BestRequest(int32_t r) const {
    Request best{0, -1, -1};
    const int64_t slack = context_.Share(r, kind_ == Kind::kLoad ? load_cut_ : Now().Level()) - Now().load[r];
    if (slack <= 0) return best;
    for (int32_t j = 0; j < context_.instances; ++j) {
      const int32_t expert = state_.ExpertOf(context_, r, j);
      if (expert < 0) continue;
      const int32_t main = expert / context_.mains;
      Consider(r, j, main, expert % context_.mains, slack, best);
      for (int32_t slot = memory_.holders.first[expert]; slot >= 0; slot = memory_.holders.next[slot]) {
        Consider(r, j, slot / context_.slots, context_.mains + slot % context_.slots, slack, best);
      }
    }
    return best;
  }

  TOPOEP_BODY void Consider(int32_t to, int32_t to_instance, int32_t from, int32_t from_instance, int64_t slack,
                            Request& best) const {
    if (from == to) return;
    const int64_t over = Over(from);
    if (over <= 0) return;
    const int32_t there = context_.DomainOf(to);
    const int32_t here = context_.DomainOf(from);
    const int32_t item = from * context_.instances + from_instance;
    const int64_t* by_domain = Now().by_domain + int64_t{item} * context_.num_domains;
    const int64_t rows = Now().rows[item];
    const int64_t back = there != here ? by_domain[there] : 0;
    int64_t movable = 0;
    switch (kind_) {
      case Kind::kLoad:
        movable = by_domain[there] + Min(InterRoom(to), rows - by_domain[there]);
        break;
      case Kind::kInbound:
        movable = back + Min(InterRoom(to), rows - by_domain[here] - back);
        break;
      case Kind::kHome:
        movable = back;
        break;
    }
    const int64_t want = Min(Min(slack, over), movable);
    const int32_t best_from = best.from < 0 ? 0 : best.from / context_.instances;
    const bool first = best.to < 0 || to_instance < best.to || (to_instance == best.to && from < best_from);
    if (want > best.want || (want > 0 && want == best.want && first)) {
      best = Request{want, item, to_instance};
    }
  }

  // Rows granted to rank r: its request must be the largest to that instance, and the giver stops at its target, lower
  // instances first.
  TOPOEP_BODY int64_t Grant(int32_t r) const {
    const Request& request = memory_.request[r];
    if (request.want <= 0 || !IsLargest(r)) return 0;
    const int32_t giver = request.from / context_.instances;
    int64_t left = Over(giver);
    for (int32_t o = 0; o < context_.ranks && left > 0; ++o) {
      const Request& other = memory_.request[o];
      if (other.want <= 0 || other.from >= request.from || other.from / context_.instances != giver) continue;
      if (IsLargest(o)) left -= other.want;
    }
    return Max(Min(left, request.want), 0);
  }
  TOPOEP_BODY bool IsLargest(int32_t r) const {
    const Request& request = memory_.request[r];
    for (int32_t o = 0; o < context_.ranks; ++o) {
      const Request& other = memory_.request[o];
      if (other.from != request.from) continue;
      if (IsLess(request.want, other.want, o, r)) return false;
    }
    return true;
  }

  // Best sources first: the taker itself, its domain, neighbours of both, sources whose rows leave their
  // domain anyway, sources whose rows would begin to.
  TOPOEP_BODY int32_t ClassOf(int32_t source, int32_t to, int32_t from) const {
    if (source == to) return 0;
    const bool is_inter = context_.DomainOf(source) != context_.DomainOf(from);
    const bool will_be_inter = context_.DomainOf(source) != context_.DomainOf(to);
    if (will_be_inter) return is_inter ? 3 : 4;
    return is_inter ? 1 : 2;
  }
  TOPOEP_BODY int64_t Limit(int32_t source, int32_t to, int32_t item) const {
    const int32_t from = item / context_.instances;
    const int64_t rows = *state_.Quota(context_, source, from, item % context_.instances);
    const bool is_inter = context_.DomainOf(source) != context_.DomainOf(from);
    const int32_t source_class = ClassOf(source, to, from);
    switch (kind_) {
      case Kind::kLoad:
        if (source_class != 4 || !bound_) return rows;
        return Min(rows, Max(Now().Inter() - Now().inter_out[source], 0));
      case Kind::kInbound:
        return is_inter ? rows : 0;
      case Kind::kHome:
        return is_inter && source_class <= 1 ? rows : 0;
    }
    return 0;
  }

  // Also adds what it changes to `next`.
  TOPOEP_BODY void Take(int32_t r, const Measure& next) const {
    int32_t* take = memory_.take + int64_t{r} * context_.ranks;
    int64_t amount = memory_.amount[r];
    if (amount <= 0) return;
    const int32_t item = memory_.request[r].from;
    const int32_t from = item / context_.instances;
    constexpr int32_t kClasses = 5;
    int64_t start[kClasses + 1] = {};
    for (int32_t s = 0; s < context_.ranks; ++s) start[ClassOf(s, r, from) + 1] += Limit(s, r, item);
    for (int32_t i = 0; i < kClasses; ++i) start[i + 1] += start[i];
    int64_t most = start[kClasses];
    if (kind_ == Kind::kLoad || kind_ == Kind::kInbound) most = start[3] + InterRoom(r);
    amount = Min(amount, most);
    int64_t taken = 0;
    for (int32_t s = 0; s < context_.ranks; ++s) {
      const int64_t rows = Limit(s, r, item);
      int64_t& before = start[ClassOf(s, r, from)];
      take[s] = static_cast<int32_t>(Min(rows, Max(amount - before, 0)));
      before += rows;
      taken += take[s];
      if (take[s] == 0) continue;
      AddExecuted(team_, context_, next, s, from, item % context_.instances, -take[s]);
      AddExecuted(team_, context_, next, s, r, memory_.request[r].to, take[s]);
    }
    memory_.amount[r] = taken;
  }

  Team& team_;
  const Context& context_;
  const Problem& problem_;
  const ImproveMemory& memory_;
  const State& state_;
  Kind kind_ = Kind::kLoad;
  bool bound_ = true;
  int64_t load_cut_ = 0;
  int64_t inter_cut_ = 0;
  int64_t cost_ = 0;      // of the plan as it is, as the phase counts it
  int32_t now_ = 0;       // of the measures
  int32_t before_ = 1;    // of the measures: the other one that the last round compared
  bool pending_ = false;  // the last round's takes are still to be applied
};

}  // namespace topoep
