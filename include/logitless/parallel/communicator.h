// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "logitless/export.h"
#include "logitless/result.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// A collective that is under way. Its buffers belong to the transport until wait() has returned;
// the destructor waits, whatever comes of it.
class Pending {
 public:
  virtual ~Pending() = default;
  Pending() = default;
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  virtual Result<void> wait() = 0;
};
using PendingSum = Pending;

// One that is done already.
class NothingPending final : public Pending {
 public:
  Result<void> wait() override { return {}; }
};

// What vocabulary parallel needs of a transport. Every call is collective: all ranks make the same
// calls in the same order, with the same sizes. A transport moves bytes and adds; it checks nothing
// that all ranks would have to know, and its failures are ErrorKind::communication.
//
// Implementations: self_communicator() here, mpi_communicator() in liblogitless_mpi; write one to
// bring your own transport.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;  // >= 1

  // all: size() * mine.size() bytes, the ranks' contributions in rank order.
  virtual Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;

  // The same, going on while the caller computes. A transport that cannot do that may leave this
  // to the blocking form.
  virtual Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                            std::span<std::byte> all) {
    if (auto ok = all_gather(mine, all); !ok) return ok.error();
    return std::unique_ptr<Pending>(std::make_unique<NothingPending>());
  }

  // values[i] = sum over ranks of values[i], in place. Every rank gets the same bits, every time.
  // The sum goes on while the caller computes, if the transport can do that (it says).
  virtual Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) = 0;

  // values: counts[0] floats for rank 0, then counts[1] for rank 1, ...; `mine`, of
  // counts[rank()] floats, becomes the sum over ranks of this rank's part. The buffers must not
  // overlap.
  virtual Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(
      std::span<const float> values, std::span<const int64_t> counts, std::span<float> mine) = 0;

  // The blocking forms.
  virtual Result<void> all_reduce_sum(std::span<float> values) {
    auto pending = start_all_reduce_sum(values);
    if (!pending) return pending.error();
    return (*pending)->wait();
  }
  virtual Result<void> reduce_scatter_sum(std::span<const float> values,
                                          std::span<const int64_t> counts, std::span<float> mine) {
    auto pending = start_reduce_scatter_sum(values, counts, mine);
    if (!pending) return pending.error();
    return (*pending)->wait();
  }
};

// Every rank gets the same: the error of the lowest rank that has one, or fine. One all-gather of
// 512 bytes, for what may go wrong on one rank before a collective that it would then miss: a file
// that cannot be read, memory that is not there.
LOGITLESS_API Result<void> share_status(Communicator& communicator, const Result<void>& mine);

// One rank: nothing moves.
LOGITLESS_API std::unique_ptr<Communicator> self_communicator();

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
