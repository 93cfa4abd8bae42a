// SPDX-License-Identifier: Apache-2.0
// The transport of liblogitless_mpi; needs <mpi.h>. The library itself neither links nor loads MPI.
#pragma once

#include <mpi.h>

#include <memory>

#include "logitless/parallel/communicator.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Collective over `communicator`, which is duplicated: messages cannot be mistaken for the
// caller's, and MPI's errors on the duplicate become ErrorKind::communication. Freed by the
// destructor, which is collective too; MPI_Finalize comes later.
//
// MPI must have been initialised with a thread level of
//   MPI_THREAD_FUNNELED    every call from the thread that initialised MPI; what was started runs
//                          inside wait()
//   MPI_THREAD_SERIALIZED  or MPI_THREAD_MULTIPLE: it also goes on while the caller computes, moved
//                          by a thread of ours, which calls MPI only while something is under way.
//                          With SERIALIZED no other thread of the process may call MPI meanwhile.
// The errors of this function: invalid_argument, communication.
LOGITLESS_API Result<std::unique_ptr<Communicator>> mpi_communicator(MPI_Comm communicator);

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless
