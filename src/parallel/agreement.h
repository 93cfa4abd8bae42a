// SPDX-License-Identifier: Apache-2.0
// One small all-gather in which every rank says how it is and what it was given, so that all of
// them come to the same verdict with the same sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "logitless/parallel/communicator.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Something that must be the same on every rank. What two ranks were given is told by `describe`;
// null: the values are hashes, which say nothing to a reader.
struct Agreed {
  const char* name;
  int64_t value;
  std::string (*describe)(int64_t value);
};

// What one rank says: 512 bytes, whatever the problem's size.
struct Statement {
  static constexpr int kOwn = 4;
  static constexpr int kMostFields = 22;
  static constexpr int kMessageBytes = 296;
  int32_t version;
  int32_t kind;       // ErrorKind, or 0: this rank is fine
  int64_t own[kOwn];  // differs between ranks: whatever the caller wants to know of all
  int64_t fields[kMostFields];
  char message[kMessageBytes];
};
static_assert(sizeof(Statement) == 512 && std::is_trivially_copyable_v<Statement>);

// That this rank is fine, or its error; no fields.
Statement statement_of(const Result<void>& mine);

// Gathers the statements into `all` (size() of them) and compares. The result is the same on every
// rank: the error of the lowest rank that has one (`mine` is this rank's), else a field in which
// ranks differ, else fine.
Result<void> agree(Communicator& communicator, const Result<void>& mine,
                   std::span<const Agreed> fields, std::span<const int64_t> own,
                   std::span<Statement> all);

// The first error of `kinds` (0 = fine), with its rank unless every rank says the same.
Result<void> first_error(std::span<const Statement> all);

// Order-dependent hash of words, for contents that must agree.
class Hash {
 public:
  void add(uint64_t word) {
    state_ = (state_ ^ word) * 0x9e3779b97f4a7c15u;
    state_ ^= state_ >> 29;
  }
  int64_t value() const { return static_cast<int64_t>(state_); }

 private:
  uint64_t state_ = 0x243f6a8885a308d3u;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
