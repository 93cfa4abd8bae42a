// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "logitless/parallel/communicator.h"

// Ranks as threads of one process: a transport for tests, under which the sanitizers see
// everything.
namespace logitless::test {

struct ThreadRanksOptions {
  // Called on a rank's thread before each of its collectives; may sleep.
  std::function<void(int rank)> before_call = {};
  // The collective (counted from 0) that fails on every rank; -1: none.
  int failing_call = -1;
};

// What one rank sent, in bytes of payload.
struct Traffic {
  int gathers = 0;
  int64_t gathered_bytes = 0;  // this rank's contributions
  int sums = 0;
  int64_t reduced_floats = 0;
  int64_t scattered_floats = 0;
};

// Runs body on `ranks` threads, each with a communicator, and joins them. Strict: collectives that
// do not match, a rank that ends while others wait for it, and a buffer that is touched while its
// collective is under way are test failures, and every rank gets ErrorKind::communication. Sums are
// made in rank order. Buffers of sums hold NaN from start to wait, those of gathers ones.
void run_ranks(int ranks, const std::function<void(Communicator& communicator)>& body,
               const ThreadRanksOptions& options = {});

// Of a communicator made by run_ranks.
const Traffic& traffic_of(const Communicator& communicator);

}  // namespace logitless::test
