// SPDX-License-Identifier: Apache-2.0
// For programs that load liblogitless_mpi.so when they run under mpirun, and not otherwise: the
// name and type of what to look up in it. Needs no <mpi.h>.
#pragma once

#include <cstddef>

#include "logitless/parallel/communicator.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// All ranks of the job; the caller owns the communicator. Initialises MPI with
// MPI_THREAD_SERIALIZED unless somebody has; what it initialises, the communicator's destructor
// finalises. Null on failure, whose sentence is then in `error`.
using OpenMpiWorld = Communicator*(char* error, size_t error_bytes);
inline constexpr const char* kOpenMpiWorld = "logitless_mpi_v0_open_world";

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
