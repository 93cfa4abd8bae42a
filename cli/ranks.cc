// SPDX-License-Identifier: Apache-2.0
#include "cli/ranks.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string_view>

#include "cli/failure.h"
#include "cli/units.h"
#include "logitless/machine.h"
#include "logitless/parallel/mpi_world.h"

namespace logitless::cli {
namespace {

// What a launcher says in the environment, or 0.
int64_t number_in_environment(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets any
    if (text == nullptr) continue;
    const std::string_view view(text);
    int64_t value = 0;
    std::from_chars(view.data(), view.data() + view.size(), value);
    if (value > 0) return value;
  }
  return 0;
}

int64_t ranks_in_environment() {
  return number_in_environment({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
}

Error bad_split(const std::string& text, const std::string& rule) {
  return Error{.kind = ErrorKind::invalid_argument,
               .message = fmt::format("--split is '{}', {}", printable(text), rule)};
}

std::unique_ptr<Communicator> opened_ranks() {
  if (!started_as_rank()) return self_communicator();
#ifdef LOGITLESS_MPI_LIBRARY
  // Global: plugins of MPI look for its symbols there.
  void* library = ::dlopen(LOGITLESS_MPI_LIBRARY, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    fail(fmt::format("started as one of {} ranks, but {} cannot be loaded: {}",
                     ranks_in_environment(), LOGITLESS_MPI_LIBRARY, ::dlerror()));
  }
  auto* open = reinterpret_cast<OpenMpiWorld*>(::dlsym(library, kOpenMpiWorld));
  if (open == nullptr) {
    fail(fmt::format("{} is of another version: {}", LOGITLESS_MPI_LIBRARY, ::dlerror()));
  }
  char error[512] = {};
  std::unique_ptr<Communicator> world(open(error, sizeof error));
  if (!world) fail(std::string(error));
  if (world->size() != ranks_in_environment()) {
    fail(fmt::format("started as one of {} ranks, but {} sees {}: is this mpirun another MPI's?",
                     ranks_in_environment(), LOGITLESS_MPI_LIBRARY, world->size()));
  }
  return world;
#else
  fail(fmt::format("started as one of {} ranks, but this program was built without MPI",
                   ranks_in_environment()));
#endif
}

}  // namespace

bool started_as_rank() { return ranks_in_environment() > 1; }

Result<std::vector<RowRange>> parse_split(const std::string& text, int64_t V, int ranks) {
  std::vector<RowRange> cover;
  if (text == "balanced" || text == "padded") {
    for (int r = 0; r < ranks; ++r) {
      const auto shard =
          text == "balanced" ? balanced_shard(V, ranks, r) : padded_shard(V, ranks, r);
      if (!shard) return shard.error();
      cover.push_back(*shard);
    }
    return cover;
  }
  std::vector<int64_t> cuts;
  std::string_view rest = text;
  while (true) {
    int64_t cut = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), cut);
    if (error != std::errc()) {
      return bad_split(text, "must be balanced, padded, or row numbers as in 0,100,100,32000");
    }
    cuts.push_back(cut);
    rest.remove_prefix(static_cast<size_t>(end - rest.data()));
    if (rest.empty()) break;
    if (rest.front() != ',') {
      return bad_split(text, "must be balanced, padded, or row numbers as in 0,100,100,32000");
    }
    rest.remove_prefix(1);
  }
  if (static_cast<int64_t>(cuts.size()) != int64_t{ranks} + 1) {
    return bad_split(text, fmt::format("has {} numbers, {} ranks need {}: where each one's rows "
                                       "begin, and where the last one's end",
                                       cuts.size(), ranks, ranks + 1));
  }
  if (cuts.front() != 0 || cuts.back() != V || !std::ranges::is_sorted(cuts)) {
    return bad_split(text, fmt::format("must rise from 0 to V = {}", V));
  }
  for (size_t r = 0; r + 1 < cuts.size(); ++r) cover.push_back({cuts[r], cuts[r + 1]});
  return cover;
}

int threads_of_rank() {
  const int64_t local = number_in_environment({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  const bool asked = number_in_environment({"OMP_NUM_THREADS"}) > 0;
  const int cpus = default_threads();
  const bool bound = cpus < ::sysconf(_SC_NPROCESSORS_ONLN);
  if (local <= 1 || asked || bound) return 0;
  return static_cast<int>(std::max<int64_t>(1, cpus / local));
}

Communicator& open_ranks() {
  static const std::unique_ptr<Communicator> ranks = opened_ranks();
  return *ranks;
}

void on_every_rank(Communicator& communicator, const std::function<void()>& work) {
  Result<void> mine;
  try {
    work();
  } catch (const Failure& failure) {
    const bool cancelled = failure.exit_code == kExitCancelled;
    mine = Error{cancelled ? ErrorKind::cancelled : ErrorKind::invalid_data, failure.message};
  } catch (const std::bad_alloc&) {
    mine = Error{ErrorKind::invalid_data, "there is not enough memory for this case"};
  }
  const Result<void> shared = share_status(communicator, mine);
  if (shared) return;
  Failure failure{
      .exit_code = shared.error().kind == ErrorKind::cancelled ? kExitCancelled : kExitBadInput,
      .message = communicator.rank() == 0 ? shared.error().message : ""};
  throw failure;
}

void take_on_ranks(const Communicator& communicator, const Result<void>& result) {
  if (result) return;
  const bool cancelled = result.error().kind == ErrorKind::cancelled;
  throw Failure{.exit_code = cancelled ? kExitCancelled : kExitBadInput,
                .message = communicator.rank() == 0 ? result.error().message : ""};
}

SparseCounts over_ranks(Communicator& communicator, const SparseCounts& mine) {
  std::vector<SparseCounts> all(static_cast<size_t>(communicator.size()));
  take(communicator.all_gather(std::as_bytes(std::span(&mine, 1)),
                               std::as_writable_bytes(std::span(all))));
  SparseCounts whole = mine;  // rows and dense_rows are the same on every rank
  whole.kept = whole.elements = 0;
  for (const SparseCounts& counts : all) {
    whole.kept += counts.kept;
    whole.elements += counts.elements;
  }
  return whole;
}

}  // namespace logitless::cli
