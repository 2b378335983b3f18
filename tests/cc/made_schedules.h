// The schedules of one rank with their memory, for tests.

#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/cc/transfer_workload.h"

namespace topoep {

using Row = std::vector<int64_t>;

inline Row ToRow(const Copy& copy) {
  return {copy.peer, copy.hop, copy.expert, copy.slice, copy.slices, copy.from, copy.from_row, copy.to, copy.to_row};
}

struct MadeSchedules {
  MadeSchedules(const TransferCase& c, int32_t rank)
      : problem(c.ToProblem()), table(problem), domains(table.View()), half_bytes(c.Windows().HalfBytes()) {
    Arena measured;
    Layout(c, rank, measured);
    memory.reset(new char[measured.Used()]);
    std::memset(memory.get(), 0x7f, measured.Used());
    Arena arena(memory.get());
    Layout(c, rank, arena);
  }
  void Layout(const TransferCase& c, int32_t rank, Arena& arena) {
    pull = PullSchedule(problem, domains, rank, c.row_bytes, arena);
    push = PushSchedule(problem, rank, 4 * c.columns, half_bytes, arena);
  }
  template <class Team>
  void Make(Team& team, const std::vector<int32_t>& slot_expert) {
    MakePullSchedule(team, problem, domains, slot_expert.data(), pull);
    MakePushSchedule(team, slot_expert.data(), push);
  }

  // Everything that the bodies read.
  std::vector<Row> Contents() const {
    std::vector<Row> rows{{*pull.num_hops},
                          Row(pull.holders, pull.holders + problem.num_experts),
                          Row(pull.held, pull.held + pull.num_slots),
                          Row(pull.incoming_begin, pull.incoming_begin + kMaxHops + 1),
                          Row(pull.outgoing_begin, pull.outgoing_begin + kMaxHops + 1),
                          Row(pull.receives, pull.receives + kMaxHops * pull.num_ranks),
                          Row(pull.sends, pull.sends + kMaxHops * pull.num_ranks),
                          Row(push.replicas_of, push.replicas_of + push.num_ranks),
                          Row(push.from, push.from + push.num_ranks)};
    for (int32_t i = 0; i < pull.incoming_begin[kMaxHops]; ++i) rows.push_back(ToRow(pull.incoming[i]));
    for (int32_t i = 0; i < pull.outgoing_begin[kMaxHops]; ++i) rows.push_back(ToRow(pull.outgoing[i]));
    for (int32_t i = 0; i < push.num_slots; ++i) {
      rows.push_back({push.slots[i].owner, push.slots[i].index, push.slots[i].piece});
    }
    for (int32_t i = 0; i < push.replicas_of[push.rank]; ++i) {
      rows.push_back({push.replicas[i].main, push.replicas[i].first, push.replicas[i].next});
    }
    return rows;
  }

  Problem problem;
  DomainTable table;
  Domains domains;
  int64_t half_bytes;
  std::unique_ptr<char[]> memory;
  PullSchedule pull;
  PushSchedule push;
};

}  // namespace topoep
