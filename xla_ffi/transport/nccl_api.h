// NCCL through a table of functions that is filled at run time: the library has no NCCL among its dependencies, so it
// loads on a machine without one, and the process shares the copy that XLA has loaded.

#pragma once

#include <nccl.h>
#include <nccl_device/host.h>

#include <string>

namespace topoep {

// Every function of NCCL that the host calls, without its prefix.
// clang-format off
#define TOPOEP_NCCL_FUNCTIONS(F) \
  F(GetVersion) F(GetErrorString) F(GetLastError) F(GetUniqueId) \
  F(CommInitRankConfig) F(CommGetAsyncError) F(CommQueryProperties) F(CommDestroy) F(CommAbort) \
  F(MemAlloc) F(MemFree) F(CommWindowRegister) F(CommWindowDeregister) F(DevCommCreate) F(DevCommDestroy)
// clang-format on

struct NcclApi {
#define TOPOEP_DECLARE(name) decltype(&::nccl##name) name;
  TOPOEP_NCCL_FUNCTIONS(TOPOEP_DECLARE)
#undef TOPOEP_DECLARE
  int version;  // of the library that was found, as NCCL_VERSION_CODE
};

// The process's NCCL: what is loaded already, else the file `path` (may be null), else the loader's own search. The
// first success holds for the life of the process. Null with a reason in `error` if there is none, if it lacks a
// function, or if it is older than the headers of this build.
const NcclApi* LoadNccl(const char* path, std::string* error);

// "2.32.3" for 23203.
std::string VersionText(int version);

}  // namespace topoep
