// SPDX-License-Identifier: Apache-2.0
// The transport over MPI. Nothing here computes: MPI moves and adds.
//
// Non-blocking collectives of MPI advance only inside calls of MPI, so while the caller computes, a
// thread of ours looks at the pending ones, every kPollInterval. It and the caller take turns under
// a mutex, which is what MPI_THREAD_SERIALIZED asks for.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "logitless/parallel/mpi_communicator.h"
#include "logitless/parallel/mpi_world.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
namespace {

// A look costs a microsecond or two where nothing has happened. Long messages advance by many
// segments per look, so longer intervals leave a fast link idle, and shorter ones take the cores.
constexpr std::chrono::microseconds kPollInterval{50};
constexpr size_t kUnit = 64;  // bytes of the type that long gathers count in

std::string number(int64_t value) { return std::to_string(value); }

const char* level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    case MPI_THREAD_MULTIPLE:
      return "MPI_THREAD_MULTIPLE";
    default:
      return "an unknown thread level";
  }
}

Error failure(const std::string& what) { return Error{ErrorKind::communication, what}; }

// MPI's own sentence for a code that is not MPI_SUCCESS.
Error mpi_error(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) {
    return failure(std::string(call) + ": MPI error " + number(code));
  }
  return failure(std::string(call) + ": " + std::string(text, static_cast<size_t>(length)));
}

Result<void> checked(const char* call, int code) {
  if (code == MPI_SUCCESS) return {};
  return mpi_error(call, code);
}

// One collective under way. `request` is MPI_REQUEST_NULL, and `code` final, once it is done.
struct Request {
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_SUCCESS;
};

// The thread that looks, and the turns it takes with the caller.
class Progress {
 public:
  ~Progress() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  // Calls of MPI happen with this held.
  std::unique_lock<std::mutex> turn() { return std::unique_lock(mutex_); }

  void add(Request& request) {
    const auto lock = turn();
    if (!thread_.joinable()) thread_ = std::thread([this] { look(); });
    pending_.push_back(&request);
    wake_.notify_one();
  }
  // In a turn.
  void remove(Request& request) { std::erase(pending_, &request); }

 private:
  void look() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (pending_.empty()) {
        wake_.wait(lock, [this] { return stop_ || !pending_.empty(); });
        continue;
      }
      for (Request* r : pending_) {
        int done = 0;
        r->code = MPI_Test(&r->request, &done, MPI_STATUS_IGNORE);
        if (r->code != MPI_SUCCESS) r->request = MPI_REQUEST_NULL;
      }
      std::erase_if(pending_, [](const Request* r) { return r->request == MPI_REQUEST_NULL; });
      wake_.wait_for(lock, kPollInterval, [this] { return stop_; });
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Request*> pending_;
  bool stop_ = false;
  std::thread thread_;
};

class MpiPending final : public Pending {
 public:
  // what: in its errors. `counts` are read by MPI until a sum is done.
  MpiPending(Progress& progress, const char* what, std::vector<int> counts = {})
      : progress_(progress), what_(what), counts_(std::move(counts)) {}
  ~MpiPending() override { (void)end(); }
  Result<void> wait() override { return end(); }

  Request& request() { return request_; }
  const int* counts() const { return counts_.data(); }

 private:
  Result<void> end() {
    const auto turn = progress_.turn();
    progress_.remove(request_);
    if (request_.request != MPI_REQUEST_NULL) {
      request_.code = MPI_Wait(&request_.request, MPI_STATUS_IGNORE);
      request_.request = MPI_REQUEST_NULL;
    }
    return checked(what_, request_.code);
  }

  Progress& progress_;
  const char* what_;
  std::vector<int> counts_;
  Request request_;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, MPI_Datatype unit, int rank, int size, int level)
      : comm_(comm), unit_(unit), rank_(rank), size_(size), level_(level) {}

  ~MpiCommunicator() override {
    int finalized = 0;
    if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0) return;
    const auto turn = progress_.turn();
    MPI_Type_free(&unit_);
    MPI_Comm_free(&comm_);
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    if (auto ok = may_call(); !ok) return ok;
    const auto part = part_of(mine);
    if (!part) return part.error();
    const auto turn = progress_.turn();
    return checked("MPI_Allgather", MPI_Allgather(mine.data(), part->count, part->type, all.data(),
                                                  part->count, part->type, comm_));
  }

  Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                    std::span<std::byte> all) override {
    if (auto ok = may_call(); !ok) return ok.error();
    const auto part = part_of(mine);
    if (!part) return part.error();
    auto pending = std::make_unique<MpiPending>(progress_, "gather of all ranks");
    auto turn = progress_.turn();
    const int code = MPI_Iallgather(mine.data(), part->count, part->type, all.data(), part->count,
                                    part->type, comm_, &pending->request().request);
    turn.unlock();
    return started("MPI_Iallgather", code, std::move(pending));
  }

  Result<void> all_reduce_sum(std::span<float> values) override {
    if (auto ok = may_call(); !ok) return ok;
    if (auto ok = check_count("all_reduce_sum", values.size()); !ok) return ok;
    const auto turn = progress_.turn();
    return checked("MPI_Allreduce",
                   MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()),
                                 MPI_FLOAT, MPI_SUM, comm_));
  }

  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    if (auto ok = may_call(); !ok) return ok.error();
    if (auto ok = check_count("all_reduce_sum", values.size()); !ok) return ok.error();
    auto pending = std::make_unique<MpiPending>(progress_, kSum);
    auto turn = progress_.turn();
    const int code = MPI_Iallreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()),
                                    MPI_FLOAT, MPI_SUM, comm_, &pending->request().request);
    turn.unlock();
    return started("MPI_Iallreduce", code, std::move(pending));
  }

  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
                                                               std::span<const int64_t> counts,
                                                               std::span<float> mine) override {
    if (auto ok = may_call(); !ok) return ok.error();
    if (auto ok = check_count("reduce_scatter_sum", values.size()); !ok) return ok.error();
    std::vector<int> ints;
    for (const int64_t count : counts) ints.push_back(static_cast<int>(count));
    auto pending = std::make_unique<MpiPending>(progress_, kSum, std::move(ints));
    auto turn = progress_.turn();
    const int code = MPI_Ireduce_scatter(values.data(), mine.data(), pending->counts(), MPI_FLOAT,
                                         MPI_SUM, comm_, &pending->request().request);
    turn.unlock();
    return started("MPI_Ireduce_scatter", code, std::move(pending));
  }

 private:
  static constexpr const char* kSum = "sum over ranks";

  // A rank's bytes as MPI counts them.
  struct Part {
    int count;
    MPI_Datatype type;
  };
  Result<Part> part_of(std::span<const std::byte> mine) const {
    const bool units = mine.size() % kUnit == 0;
    const size_t count = units ? mine.size() / kUnit : mine.size();
    if (count > INT_MAX) {
      return failure("all_gather: " + number(static_cast<int64_t>(mine.size())) +
                     " bytes from a rank, must be at most 2^31 - 1 units of 64 bytes");
    }
    return Part{static_cast<int>(count), units ? unit_ : MPI_BYTE};
  }

  // Not in a turn: what failed to start is destroyed here, which takes one.
  Result<std::unique_ptr<PendingSum>> started(const char* call, int code,
                                              std::unique_ptr<MpiPending> pending) {
    if (code != MPI_SUCCESS) return mpi_error(call, code);
    // Where no thread of ours may call MPI, requests advance in wait() alone.
    if (level_ >= MPI_THREAD_SERIALIZED) progress_.add(pending->request());
    return std::unique_ptr<PendingSum>(std::move(pending));
  }

  Result<void> may_call() const {
    int finalized = 0;
    if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized != 0) {
      return failure("communicator: MPI_Finalize was called before");
    }
    int main_thread = 1;
    if (level_ == MPI_THREAD_FUNNELED && MPI_Is_thread_main(&main_thread) == MPI_SUCCESS &&
        main_thread == 0) {
      return failure(
          "communicator: used from a thread that did not initialise MPI, which needs "
          "MPI_THREAD_SERIALIZED; MPI was initialised with MPI_THREAD_FUNNELED");
    }
    return {};
  }
  static Result<void> check_count(const char* what, size_t count) {
    if (count <= INT_MAX) return {};
    return failure(std::string(what) + ": " + number(static_cast<int64_t>(count)) +
                   " floats, must be at most 2^31 - 1: give a smaller chunk_tokens");
  }

  MPI_Comm comm_;
  MPI_Datatype unit_;
  int rank_;
  int size_;
  int level_;
  Progress progress_;
};

// The world, and MPI itself where it is ours to finalise.
class World final : public Communicator {
 public:
  World(std::unique_ptr<Communicator> world, bool owns_mpi)
      : world_(std::move(world)), owns_mpi_(owns_mpi) {}
  ~World() override {
    world_.reset();
    if (owns_mpi_) MPI_Finalize();
  }
  int rank() const noexcept override { return world_->rank(); }
  int size() const noexcept override { return world_->size(); }
  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    return world_->all_gather(mine, all);
  }
  Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                    std::span<std::byte> all) override {
    return world_->start_all_gather(mine, all);
  }
  Result<void> all_reduce_sum(std::span<float> values) override {
    return world_->all_reduce_sum(values);
  }
  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    return world_->start_all_reduce_sum(values);
  }
  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
                                                               std::span<const int64_t> counts,
                                                               std::span<float> mine) override {
    return world_->start_reduce_scatter_sum(values, counts, mine);
  }

 private:
  std::unique_ptr<Communicator> world_;
  bool owns_mpi_;
};

}  // namespace

Result<std::unique_ptr<Communicator>> mpi_communicator(MPI_Comm communicator) {
  const auto invalid = [](const std::string& message) {
    return Error{ErrorKind::invalid_argument, message};
  };
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) {
    return invalid(std::string("communicator: MPI is ") +
                   (finalized != 0 ? "finalized already" : "not initialised") +
                   ", call MPI_Init_thread before");
  }
  if (communicator == MPI_COMM_NULL) return invalid("communicator is MPI_COMM_NULL");
  int inter = 0;
  if (auto ok = checked("MPI_Comm_test_inter", MPI_Comm_test_inter(communicator, &inter)); !ok) {
    return ok.error();
  }
  if (inter != 0) return invalid("communicator: an inter-communicator came, must be an intra-one");
  int level = MPI_THREAD_SINGLE;
  if (auto ok = checked("MPI_Query_thread", MPI_Query_thread(&level)); !ok) return ok.error();
  if (level < MPI_THREAD_FUNNELED) {
    return invalid(std::string("communicator: MPI was initialised with ") + level_name(level) +
                   ", must be MPI_THREAD_FUNNELED or higher (MPI_Init_thread): operators compute "
                   "on several threads");
  }
  // The duplicate starts with the caller's error handler, which may end the program.
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(communicator, &handler);
  MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN);
  MPI_Comm comm = MPI_COMM_NULL;
  const int code = MPI_Comm_dup(communicator, &comm);
  MPI_Comm_set_errhandler(communicator, handler);
  MPI_Errhandler_free(&handler);
  if (code != MPI_SUCCESS) return mpi_error("MPI_Comm_dup", code);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  MPI_Datatype unit = MPI_DATATYPE_NULL;
  if (auto ok = checked("MPI_Type_contiguous", MPI_Type_contiguous(kUnit, MPI_BYTE, &unit)); !ok) {
    return ok.error();
  }
  if (auto ok = checked("MPI_Type_commit", MPI_Type_commit(&unit)); !ok) return ok.error();
  return std::unique_ptr<Communicator>(
      std::make_unique<MpiCommunicator>(comm, unit, rank, size, level));
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless

// Found by name (kOpenMpiWorld), hence C linkage.
extern "C" LOGITLESS_API logitless::OpenMpiWorld logitless_mpi_v0_open_world;

extern "C" logitless::Communicator* logitless_mpi_v0_open_world(char* error, size_t error_bytes) {
  int initialized = 0;
  int level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  const bool owns_mpi = initialized == 0;
  if (owns_mpi) MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  auto world = logitless::mpi_communicator(MPI_COMM_WORLD);
  if (!world) {
    std::snprintf(error, error_bytes, "%s", world.error().message.c_str());
    if (owns_mpi) MPI_Finalize();
    return nullptr;
  }
  return new logitless::World(std::move(world).value(), owns_mpi);
}
