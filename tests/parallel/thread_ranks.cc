// SPDX-License-Identifier: Apache-2.0
#include "tests/parallel/thread_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace logitless::test {
namespace {

enum class Kind { all_gather, all_reduce, reduce_scatter };

// One collective: every rank's contribution.
struct Call {
  Kind kind;
  std::vector<std::vector<std::byte>> sent;
  std::vector<int64_t> counts;
  int arrived = 0;
  int left = 0;
};

class Group {
 public:
  Group(int ranks, const ThreadRanksOptions& options) : ranks_(ranks), options_(options) {}

  int ranks() const { return ranks_; }
  void before_call(int rank) const {
    if (options_.before_call) options_.before_call(rank);
  }

  // Posts a contribution to the rank's call number `index`.
  Result<void> post(int rank, int64_t index, Kind kind, std::span<const std::byte> mine,
                    std::span<const int64_t> counts) {
    const std::lock_guard lock(mutex_);
    if (index == options_.failing_call) return broken("the transport failed, as asked for");
    auto [place, fresh] = calls_.try_emplace(index, nullptr);
    if (fresh) {
      place->second = std::make_unique<Call>();
      place->second->kind = kind;
      place->second->sent.resize(static_cast<size_t>(ranks_));
      place->second->counts.assign(counts.begin(), counts.end());
    }
    Call& call = *place->second;
    const bool sizes_fit = call.arrived == 0 || std::ranges::all_of(call.sent, [&](const auto& s) {
                             return s.empty() || s.size() == mine.size();
                           });
    if (call.kind != kind || !sizes_fit || !std::ranges::equal(call.counts, counts)) {
      return misuse("collective " + std::to_string(index) + " of rank " + std::to_string(rank) +
                    " does not match the other ranks'");
    }
    call.sent[static_cast<size_t>(rank)].assign(mine.begin(), mine.end());
    ++call.arrived;
    changed_.notify_all();
    return {};
  }

  // Waits until everyone has posted; read() sees the contributions.
  template <class Read>
  Result<void> finish(int64_t index, const Read& read) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return !failure_.empty() || calls_.at(index)->arrived == ranks_ || gone_ > 0;
    });
    Call& call = *calls_.at(index);
    if (failure_.empty() && call.arrived < ranks_) {
      return misuse("a rank has ended while others wait for it");
    }
    if (!failure_.empty()) return Error{ErrorKind::communication, failure_};
    read(call);
    if (++call.left == ranks_) calls_.erase(index);
    return {};
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    ++gone_;
    changed_.notify_all();
  }

  Result<void> misuse(const std::string& what) {
    ADD_FAILURE() << what;
    return broken(what);
  }

 private:
  Result<void> broken(const std::string& what) {
    if (failure_.empty()) failure_ = what;
    changed_.notify_all();
    return Error{ErrorKind::communication, failure_};
  }

  const int ranks_;
  const ThreadRanksOptions& options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::unique_ptr<Call>> calls_;
  int gone_ = 0;
  std::string failure_;
};

class ThreadSum final : public PendingSum {
 public:
  ThreadSum(Group& group, int rank, int64_t index, Kind kind, std::span<const float> sent,
            std::span<float> out)
      : group_(group),
        rank_(rank),
        index_(index),
        kind_(kind),
        sent_(sent),
        copy_(sent.begin(), sent.end()),
        out_(out) {
    std::ranges::fill(out, std::numeric_limits<float>::quiet_NaN());
  }
  ~ThreadSum() override {
    if (!waited_) (void)wait();
  }

  Result<void> wait() override {
    waited_ = true;
    const bool scattered = kind_ == Kind::reduce_scatter;
    if (scattered && !std::ranges::equal(std::as_bytes(sent_), std::as_bytes(std::span(copy_)))) {
      return group_.misuse("the buffer of a sum was changed before wait()");
    }
    for (const float value : out_) {
      if (value == value) return group_.misuse("the result of a sum was written before wait()");
    }
    return group_.finish(index_, [&](const Call& call) {
      size_t first = 0;
      for (int r = 0; scattered && r < rank_; ++r) {
        first += static_cast<size_t>(call.counts[static_cast<size_t>(r)]);
      }
      std::ranges::fill(out_, 0.0f);
      for (const auto& sent : call.sent) {
        for (size_t i = 0; i < out_.size(); ++i) {
          float value = 0;
          std::memcpy(&value, sent.data() + (first + i) * sizeof(float), sizeof value);
          out_[i] += value;
        }
      }
    });
  }

 private:
  Group& group_;
  int rank_;
  int64_t index_;
  Kind kind_;
  std::span<const float> sent_;
  std::vector<float> copy_;
  std::span<float> out_;
  bool waited_ = false;
};

// Its result holds ones until everybody's contribution is there.
class ThreadGather final : public Pending {
 public:
  ThreadGather(Group& group, int64_t index, std::span<const std::byte> sent,
               std::span<std::byte> all)
      : group_(group), index_(index), sent_(sent), copy_(sent.begin(), sent.end()), all_(all) {
    std::ranges::fill(all, std::byte{0xff});
  }
  ~ThreadGather() override {
    if (!waited_) (void)wait();
  }

  Result<void> wait() override {
    waited_ = true;
    if (!std::ranges::equal(sent_, copy_)) {
      return group_.misuse("the buffer of a gather was changed before wait()");
    }
    for (const std::byte value : all_) {
      if (value != std::byte{0xff}) {
        return group_.misuse("the result of a gather was written before wait()");
      }
    }
    return group_.finish(index_, [&](const Call& call) {
      for (size_t r = 0; r < call.sent.size(); ++r) {
        std::ranges::copy(call.sent[r], all_.begin() + static_cast<int64_t>(r * copy_.size()));
      }
    });
  }

 private:
  Group& group_;
  int64_t index_;
  std::span<const std::byte> sent_;
  std::vector<std::byte> copy_;
  std::span<std::byte> all_;
  bool waited_ = false;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(Group& group, int rank) : group_(group), rank_(rank) {}
  ~ThreadCommunicator() override { group_.leave(); }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return group_.ranks(); }
  const Traffic& traffic() const { return traffic_; }

  Result<void> all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    auto pending = start_all_gather(mine, all);
    if (!pending) return pending.error();
    return (*pending)->wait();
  }

  Result<std::unique_ptr<Pending>> start_all_gather(std::span<const std::byte> mine,
                                                    std::span<std::byte> all) override {
    group_.before_call(rank_);
    ++traffic_.gathers;
    traffic_.gathered_bytes += static_cast<int64_t>(mine.size());
    if (all.size() != mine.size() * static_cast<size_t>(size())) {
      return group_.misuse("all_gather: the buffer does not hold everyone's bytes").error();
    }
    const int64_t index = calls_++;
    if (auto ok = group_.post(rank_, index, Kind::all_gather, mine, {}); !ok) return ok.error();
    return std::unique_ptr<Pending>(std::make_unique<ThreadGather>(group_, index, mine, all));
  }

  Result<std::unique_ptr<PendingSum>> start_all_reduce_sum(std::span<float> values) override {
    group_.before_call(rank_);
    ++traffic_.sums;
    traffic_.reduced_floats += static_cast<int64_t>(values.size());
    const int64_t index = calls_++;
    if (auto ok = group_.post(rank_, index, Kind::all_reduce, std::as_bytes(values), {}); !ok) {
      return ok.error();
    }
    return std::unique_ptr<PendingSum>(
        std::make_unique<ThreadSum>(group_, rank_, index, Kind::all_reduce, values, values));
  }

  Result<std::unique_ptr<PendingSum>> start_reduce_scatter_sum(std::span<const float> values,
                                                               std::span<const int64_t> counts,
                                                               std::span<float> mine) override {
    group_.before_call(rank_);
    ++traffic_.sums;
    traffic_.scattered_floats += static_cast<int64_t>(values.size());
    int64_t sum = 0;
    for (const int64_t count : counts) sum += count;
    if (counts.size() != static_cast<size_t>(size()) ||
        sum != static_cast<int64_t>(values.size()) ||
        mine.size() != static_cast<size_t>(counts[static_cast<size_t>(rank_)])) {
      return group_.misuse("reduce_scatter_sum: counts do not fit the buffers").error();
    }
    const int64_t index = calls_++;
    if (auto ok = group_.post(rank_, index, Kind::reduce_scatter, std::as_bytes(values), counts);
        !ok) {
      return ok.error();
    }
    return std::unique_ptr<PendingSum>(
        std::make_unique<ThreadSum>(group_, rank_, index, Kind::reduce_scatter, values, mine));
  }

 private:
  Group& group_;
  int rank_;
  int64_t calls_ = 0;
  Traffic traffic_;
};

}  // namespace

void run_ranks(int ranks, const std::function<void(Communicator& communicator)>& body,
               const ThreadRanksOptions& options) {
  Group group(ranks, options);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadCommunicator communicator(group, rank);
      body(communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

const Traffic& traffic_of(const Communicator& communicator) {
  return static_cast<const ThreadCommunicator&>(communicator).traffic();
}

}  // namespace logitless::test
