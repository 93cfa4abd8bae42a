// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "logitless/gradient.h"
#include "logitless/parallel/communicator.h"
#include "logitless/parallel/shards.h"

namespace logitless::cli {

// True in a process that mpirun (or srun with PMI) has started as one of several.
bool started_as_rank();

// "balanced", "padded", or where each rank's rows begin and the last one's end: "0,100,100,32000".
Result<std::vector<RowRange>> parse_split(const std::string& text, int64_t V, int ranks);

// Threads of one of several ranks on this machine that share all its CPUs; 0 = the library's
// default, where the rank is bound to some of them or OMP_NUM_THREADS is set.
int threads_of_rank();

// The ranks of this job; one where the process is none of several. liblogitless_mpi, and with it
// MPI, is loaded here and nowhere else, by the first call. Fails where it cannot be. They end with
// the process: mpirun ends a job as soon as one rank has failed, which must not be before rank 0
// has said why, and all ranks wait for each other in MPI_Finalize.
Communicator& open_ranks();

// Runs `work`, which may fail on some ranks only; then every rank fails, with the same sentence,
// and only rank 0 says it.
void on_every_rank(Communicator& communicator, const std::function<void()>& work);

// What a collective call returned, the same on every rank: fails on all, where rank 0 alone says
// why.
void take_on_ranks(const Communicator& communicator, const Result<void>& result);
template <typename T>
T take_on_ranks(const Communicator& communicator, Result<T> result) {
  take_on_ranks(communicator, result ? Result<void>() : Result<void>(result.error()));
  return std::move(result).value();
}

// Of the whole vocabulary, from what each rank says of its own rows. Collective; fails where the
// ranks cannot communicate.
SparseCounts over_ranks(Communicator& communicator, const SparseCounts& mine);

}  // namespace logitless::cli
