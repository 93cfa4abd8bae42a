// SPDX-License-Identifier: Apache-2.0
#include "parallel/agreement.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "logitless/version.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

constexpr int32_t kVersion =
    LOGITLESS_VERSION_MAJOR * 1000000 + LOGITLESS_VERSION_MINOR * 1000 + LOGITLESS_VERSION_PATCH;

std::string number(int64_t value) { return std::to_string(value); }

void write_message(const std::string& text, char* out) {
  const auto room = static_cast<size_t>(Statement::kMessageBytes - 1);
  std::string kept = text;
  if (kept.size() > room) kept = kept.substr(0, room - 3) + "...";
  std::memcpy(out, kept.c_str(), kept.size() + 1);
}

std::string message_of(const Statement& s) {
  return {s.message, strnlen(s.message, Statement::kMessageBytes)};
}

// What ranks a and b were given, where they differ.
std::string difference(const Agreed& field, int64_t value_a, size_t a, int64_t value_b, size_t b) {
  const std::string ranks =
      "ranks " + number(static_cast<int64_t>(a)) + " and " + number(static_cast<int64_t>(b));
  if (field.describe == nullptr) {
    return std::string(field.name) + ": " + ranks + " hold different contents, must be the same";
  }
  return std::string(field.name) + ": " + ranks + " were given " + field.describe(value_a) +
         " and " + field.describe(value_b) + ", must be the same";
}

}  // namespace

Statement statement_of(const Result<void>& mine) {
  Statement statement{};
  statement.version = kVersion;
  if (mine) return statement;
  statement.kind = static_cast<int32_t>(mine.error().kind);
  write_message(mine.error().message, statement.message);
  return statement;
}

Result<void> first_error(std::span<const Statement> all) {
  const auto failed = [](const Statement& s) { return s.kind != 0; };
  const auto first = std::ranges::find_if(all, failed);
  if (first == all.end()) return {};
  const bool everywhere = std::ranges::all_of(all, [&](const Statement& s) {
    return s.kind == first->kind && message_of(s) == message_of(*first);
  });
  const std::string who = everywhere ? "" : "rank " + number(first - all.begin()) + ": ";
  return Error{static_cast<ErrorKind>(first->kind), who + message_of(*first)};
}

Result<void> share_status(Communicator& communicator, const Result<void>& mine) {
  std::vector<Statement> all(static_cast<size_t>(communicator.size()));
  return agree(communicator, mine, {}, {}, all);
}

Result<void> agree(Communicator& communicator, const Result<void>& mine,
                   std::span<const Agreed> fields, std::span<const int64_t> own,
                   std::span<Statement> all) {
  Statement statement = statement_of(mine);
  std::ranges::copy(own, statement.own);
  for (size_t i = 0; i < fields.size(); ++i) statement.fields[i] = fields[i].value;
  if (auto ok = communicator.all_gather(std::as_bytes(std::span(&statement, 1)),
                                        std::as_writable_bytes(all));
      !ok) {
    return ok;
  }
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r].version != all[0].version) {
      return Error{ErrorKind::invalid_argument, "library: ranks 0 and " +
                                                    number(static_cast<int64_t>(r)) +
                                                    " run different versions, must be the same"};
    }
  }
  if (auto ok = first_error(all); !ok) return ok;
  for (size_t i = 0; i < fields.size(); ++i) {
    for (size_t r = 1; r < all.size(); ++r) {
      if (all[r].fields[i] != all[0].fields[i]) {
        return Error{ErrorKind::invalid_argument,
                     difference(fields[i], all[0].fields[i], 0, all[r].fields[i], r)};
      }
    }
  }
  return {};
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
