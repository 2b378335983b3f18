#include "xla_ffi/transport/nccl_api.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
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

// Fills the table from the library; the name of the first function that it lacks, or null.
const char* Fill(void* library, NcclApi* api) {
  const char* missing = nullptr;
#define TOPOEP_FIND(name)                                                          \
  api->name = reinterpret_cast<decltype(api->name)>(dlsym(library, "nccl" #name)); \
  if (api->name == nullptr && missing == nullptr) missing = "nccl" #name;
  TOPOEP_NCCL_FUNCTIONS(TOPOEP_FIND)
#undef TOPOEP_FIND
  return missing;
}

bool Load(const char* path, NcclApi* api, std::string* error) {
  const std::string built = VersionText(NCCL_VERSION_CODE);
  std::string tried;
  void* library = Open(path, &tried);
  if (library == nullptr) {
    *error = "no NCCL library (" + tried + "): install nvidia-nccl-cu12 or nvidia-nccl-cu13 of at least " + built;
    return false;
  }
  const char* missing = Fill(library, api);
  if (api->GetVersion == nullptr || api->GetVersion(&api->version) != ncclSuccess) {
    *error = "the NCCL library does not tell its version: install NCCL " + built + " or newer";
    return false;
  }
  if (missing != nullptr || api->version < NCCL_VERSION_CODE) {
    *error = "the loaded NCCL is " + VersionText(api->version) +
             (missing == nullptr ? "" : std::string(" and lacks ") + missing) + ", but topoep_jax was built for " +
             built + ": install that version or newer";
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
  static std::optional<NcclApi> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!loaded) {
    NcclApi found{};
    if (!Load(path, &found, error)) return nullptr;
    loaded = found;
  }
  return &*loaded;
}

}  // namespace topoep
