// A workspace in memory of the host.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "xla_ffi/plan/arena.h"
#include "xla_ffi/plan/domains.h"
#include "xla_ffi/plan/solve.h"

namespace topoep {

// Owns what a Workspace points to but for the problem's tables. Its memory is not cleared: no body may rely on zeros.
class HostWorkspace {
 public:
  explicit HostWorkspace(const Problem& problem, int32_t teams = 1, int64_t keep_bytes = kKeepBytes)
      : domains_(problem),
        num_bytes_(Measure(problem, teams, keep_bytes)),
        bytes_(new std::byte[num_bytes_]),
        work_(LayOut(problem, teams, keep_bytes)) {}

  const Workspace& Work() const { return work_; }

  // The memory, for those who fill it with junk or watch it.
  std::byte* begin() const { return bytes_.get(); }
  std::byte* end() const { return bytes_.get() + num_bytes_; }

 private:
  int64_t Measure(const Problem& problem, int32_t teams, int64_t keep_bytes) const {
    Arena arena;
    const Workspace unused(problem, domains_.View(), teams, arena, keep_bytes);
    return arena.Used();
  }
  Workspace LayOut(const Problem& problem, int32_t teams, int64_t keep_bytes) const {
    Arena arena(bytes_.get());
    return Workspace(problem, domains_.View(), teams, arena, keep_bytes);
  }

  DomainTable domains_;
  int64_t num_bytes_;
  std::unique_ptr<std::byte[]> bytes_;
  Workspace work_;
};

}  // namespace topoep
