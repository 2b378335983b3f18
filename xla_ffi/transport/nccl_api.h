// NCCL through a table of functions that is filled at run time: the library has no NCCL among its dependencies, so it
// loads on a machine without one, and the process shares the copy that XLA has loaded.

#ifndef TOPOEP_XLA_FFI_TRANSPORT_NCCL_API_H_
#define TOPOEP_XLA_FFI_TRANSPORT_NCCL_API_H_

#include <nccl.h>
#include <nccl_device/host.h>

#include <string>

namespace topoep {

struct NcclApi {
  decltype(&::ncclGetVersion) GetVersion;
  decltype(&::ncclGetErrorString) GetErrorString;
  decltype(&::ncclGetLastError) GetLastError;
  decltype(&::ncclGetUniqueId) GetUniqueId;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&::ncclCommQueryProperties) CommQueryProperties;
  decltype(&::ncclCommDestroy) CommDestroy;
  decltype(&::ncclCommAbort) CommAbort;
  decltype(&::ncclMemAlloc) MemAlloc;
  decltype(&::ncclMemFree) MemFree;
  decltype(&::ncclCommWindowRegister) CommWindowRegister;
  decltype(&::ncclCommWindowDeregister) CommWindowDeregister;
  decltype(&::ncclDevCommCreate) DevCommCreate;
  decltype(&::ncclDevCommDestroy) DevCommDestroy;
  int version;  // of the library that was found, as NCCL_VERSION_CODE
};

// The process's NCCL: what is loaded already, else the file `path` (may be null), else the loader's own search. The
// first success holds for the life of the process. Null with a reason in `error` if there is none, if it lacks a
// function, or if it is older than the headers of this build.
const NcclApi* LoadNccl(const char* path, std::string* error);

// "2.32.3" for 23203.
std::string VersionText(int version);

}  // namespace topoep

#endif  // TOPOEP_XLA_FFI_TRANSPORT_NCCL_API_H_
