#include "xla_ffi/plan/call.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace topoep {
namespace {

namespace ffi = xla::ffi;

ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument("topoep_plan: " + what); }

ffi::Error CheckShape(const std::string& name, ffi::Span<const int64_t> actual, const std::vector<int64_t>& expected) {
  if (std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) return ffi::Error::Success();
  return Wrong(name + " has shape " + Text(actual) + ", expected " + Text(expected));
}

}  // namespace

ffi::Error PlanCall::Read(Int32s omega, ffi::RemainingRets results, ffi::Dictionary dictionary) {
  Attributes attributes;
  for (const std::string_view name : dictionary) {
    const auto values = dictionary.get<ffi::Span<const int64_t>>(name);
    if (!values.has_value()) return values.error();
    attributes[std::string(name)].assign(values->begin(), values->end());
  }
  if (const std::string wrong = ReadProblem(attributes, owned_); !wrong.empty()) return Wrong(wrong);
  problem_ = owned_.View();
  problem_.omega = omega.typed_data();
  const int64_t ranks = problem_.num_ranks;
  const struct {
    const char* name;
    std::vector<int64_t> shape;
    int32_t*& data;
  } fields[] = {{"slot_expert", {ranks, problem_.num_slots}, plan_.slot_expert},
                {"quota", {ranks, ranks, problem_.InstancesPerRank()}, plan_.quota},
                {"rank_load", {ranks}, plan_.rank_load},
                {"predicted_ps", {2}, plan_.predicted_ps},
                {"status", {}, plan_.status}};
  ffi::Error error = CheckShape("omega", omega.dimensions(), {ranks, problem_.num_experts});
  size_t index = 0;
  for (const auto& field : fields) {
    auto result = results.get<Int32s>(index++);
    if (!result.has_value()) return result.error();
    if (error.success()) error = CheckShape(field.name, (*result)->dimensions(), field.shape);
    field.data = (*result)->typed_data();
  }
  auto workspace = results.get<Bytes>(index);
  if (!workspace.has_value()) return workspace.error();
  workspace_ = **workspace;
  return error;
}

}  // namespace topoep
