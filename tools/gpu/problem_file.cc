#include "tools/gpu/problem_file.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace topoep {
namespace {

[[noreturn]] void Give(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(2);
}

// Arrays of int64, each behind its length.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "rb")) {
    if (file_ == nullptr) Give("cannot open " + path);
  }
  ~Reader() { std::fclose(file_); }
  Reader(const Reader&) = delete;

  bool AtEnd() {
    const int next = std::fgetc(file_);
    if (next == EOF) return true;
    std::ungetc(next, file_);
    return false;
  }

  template <class T>
  std::vector<T> Take() {
    int64_t count = 0;
    Read(&count, 1);
    std::vector<int64_t> words(count);
    Read(words.data(), count);
    std::vector<T> values;
    for (const int64_t word : words) values.push_back(static_cast<T>(word));
    return values;
  }

 private:
  void Read(int64_t* words, int64_t count) {
    if (std::fread(words, sizeof(int64_t), count, file_) != static_cast<size_t>(count)) Give(path_ + " ends too early");
  }

  std::string path_;
  std::FILE* file_;
};

StoredProblem ReadQuestion(Reader& reader) {
  Attributes attributes;
  for (int64_t left = reader.Take<int64_t>().at(0); left > 0; --left) {
    const std::vector<char> name = reader.Take<char>();
    attributes[std::string(name.begin(), name.end())] = reader.Take<int64_t>();
  }
  StoredProblem stored;
  if (const std::string wrong = ReadProblem(attributes, stored); !wrong.empty()) Give("a problem's " + wrong);
  stored.omega = reader.Take<int32_t>();
  stored.right.slot_expert = reader.Take<int32_t>();
  stored.right.quota = reader.Take<int32_t>();
  stored.right.rank_load = reader.Take<int32_t>();
  stored.right.predicted_ps = reader.Take<int32_t>();
  stored.right.status = reader.Take<int32_t>();
  return stored;
}

}  // namespace

Problem StoredProblem::View() const {
  Problem problem = OwnedProblem::View();
  problem.omega = omega.data();
  return problem;
}

std::vector<StoredProblem> ReadProblems(const std::string& path) {
  Reader reader(path);
  std::vector<StoredProblem> problems;
  while (!reader.AtEnd()) problems.push_back(ReadQuestion(reader));
  return problems;
}

}  // namespace topoep
