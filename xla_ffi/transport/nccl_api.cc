#include "xla_ffi/transport/nccl_api.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

namespace topoep {
namespace {

constexpr char kSoname[] = "libnccl.so.2";

void* Open(const char* path, std::string* tried) {
  // XLA loads NCCL lazily and by path, but under the same soname. Two copies would not know each other's communicators.
  if (void* shared = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return shared;
  for (const char* name : {path, kSoname}) {
    if (name == nullptr || *name == '\0') continue;
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    const char* reason = dlerror();
    *tried += (tried->empty() ? "" : "; ") + std::string(reason == nullptr ? name : reason);
  }
  return nullptr;
}

// Fills `function` from the library; false, with its name in `missing`, if the library lacks it.
template <class Function>
bool Find(void* library, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && missing->empty()) *missing = name;
  return *function != nullptr;
}

bool Fill(void* library, NcclApi* api, std::string* missing) {
  return Find(library, "ncclGetVersion", &api->GetVersion, missing) &&
         Find(library, "ncclGetErrorString", &api->GetErrorString, missing) &&
         Find(library, "ncclGetLastError", &api->GetLastError, missing) &&
         Find(library, "ncclGetUniqueId", &api->GetUniqueId, missing) &&
         Find(library, "ncclCommInitRankConfig", &api->CommInitRankConfig, missing) &&
         Find(library, "ncclCommGetAsyncError", &api->CommGetAsyncError, missing) &&
         Find(library, "ncclCommQueryProperties", &api->CommQueryProperties, missing) &&
         Find(library, "ncclCommDestroy", &api->CommDestroy, missing) &&
         Find(library, "ncclCommAbort", &api->CommAbort, missing) &&
         Find(library, "ncclMemAlloc", &api->MemAlloc, missing) &&
         Find(library, "ncclMemFree", &api->MemFree, missing) &&
         Find(library, "ncclCommWindowRegister", &api->CommWindowRegister, missing) &&
         Find(library, "ncclCommWindowDeregister", &api->CommWindowDeregister, missing) &&
         Find(library, "ncclDevCommCreate", &api->DevCommCreate, missing) &&
         Find(library, "ncclDevCommDestroy", &api->DevCommDestroy, missing);
}

bool Load(const char* path, NcclApi* api, std::string* error) {
  const std::string built = VersionText(NCCL_VERSION_CODE);
  std::string tried;
  void* library = Open(path, &tried);
  if (library == nullptr) {
    *error = "no NCCL library (" + tried + "): install nvidia-nccl-cu12 or nvidia-nccl-cu13 of at least " + built;
    return false;
  }
  std::string missing;
  const bool complete = Fill(library, api, &missing);
  if (api->GetVersion == nullptr || api->GetVersion(&api->version) != ncclSuccess) {
    *error = "the NCCL library does not tell its version: install NCCL " + built + " or newer";
    return false;
  }
  if (!complete || api->version < NCCL_VERSION_CODE) {
    *error = "the loaded NCCL is " + VersionText(api->version) + (complete ? "" : " and lacks " + missing) +
             ", but topoep_jax was built for " + built + ": install that version or newer";
    return false;
  }
  return true;
}

}  // namespace

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const NcclApi* LoadNccl(const char* path, std::string* error) {
  static std::mutex mutex;
  static NcclApi api{};
  static bool loaded = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!loaded) {
    NcclApi found{};
    if (!Load(path, &found, error)) return nullptr;
    api = found;
    loaded = true;
  }
  return &api;
}

}  // namespace topoep
