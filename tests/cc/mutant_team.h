// A team of host threads that can leave out one barrier, chosen at run time: the very same bodies, one barrier short.

#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "xla_ffi/team/thread_team.h"

namespace topoep {

// Where a barrier stands in the sources, as "xla_ffi/.../file.h:12".
inline std::string SiteName(const char* file, int line) {
  const char* root = std::strstr(file, "xla_ffi/");
  return std::string(root == nullptr ? file : root) + ":" + std::to_string(line);
}

// The barrier that every lane of every MutantTeam leaves out; empty: none. Set it while no team runs.
inline std::string mutant_site;
// How often lane 0 came to each barrier. Read it while no team runs.
inline std::map<std::string, int64_t> site_visits;

class MutantTeam : public ThreadTeamWith<MutantTeam> {
 public:
  using ThreadTeamWith::ThreadTeamWith;

  void Sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const std::string site = SiteName(file, line);
    if (lane_ == 0) ++site_visits[site];
    if (site != mutant_site) state_.Wait();
  }
};

}  // namespace topoep
