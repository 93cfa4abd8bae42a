// SPDX-License-Identifier: Apache-2.0
// Streams: ordered queues, each with a thread that works beside the callers. Events are marks in
// them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "handles.h"
#include "logitless/cancel.h"
#include "status.h"

namespace logitless::ascend {

using Clock = std::chrono::steady_clock;
using Deadline = std::optional<Clock::time_point>;  // absent: for ever

// -1 = for ever; the caller has rejected what is below.
Deadline deadline_after(int32_t timeout_ms);

// A point of a stream: reached once, then for ever.
class Record {
 public:
  explicit Record(uint64_t stream_id) : stream_id_(stream_id) {}

  // with_time: it was reached in order, so the time means something.
  void reach(bool with_time);
  bool reached() const;
  std::optional<Clock::time_point> time() const;
  // Until reached, or the deadline, or *abandon (set before calling wake). Returns reached().
  bool wait(const Deadline& deadline, const std::atomic<bool>* abandon = nullptr);
  void wake();
  uint64_t stream_id() const { return stream_id_; }

 private:
  const uint64_t stream_id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::optional<Clock::time_point> time_;
};

class Stream;

struct Task {
  // Runs on the stream's thread; a failure is kept for the next synchronise. May be empty.
  std::function<Status(Stream&)> work;
  // Reached when the task is over, also when its work was skipped or dropped.
  std::shared_ptr<Record> over = nullptr;
  // Runs although an earlier failure stopped the stream.
  bool even_when_stopped = false;
};

class Stream {
 public:
  static constexpr HandleKind kKind = HandleKind::stream;

  // Throws std::system_error when no thread can be had. context: the handle of its context.
  explicit Stream(const void* context);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  // Whether there ever was one in this process.
  static bool any_started();

  uint64_t id() const { return id_; }
  const void* context() const { return context_; }
  // Whether the calling thread is this stream's own, which must not wait for it.
  bool is_current() const;

  Status enqueue(Task task);
  // Until everything enqueued before this call is over.
  bool wait_idle(const Deadline& deadline);
  bool idle() const;
  // What failed since the last call; repeated while the stream is stopped.
  Status take_failure();
  // true: work after a failure is skipped until this is called again.
  void set_stop_on_failure(bool stop);

  // Ends the thread: after the queued work, or (drop) as soon as the running task ends, which is
  // asked to. Once, and never on the stream's own thread.
  void close(bool drop);

  // For tasks, on the stream's thread. wait: returns early when the stream is being dropped.
  const CancelToken& cancel() const { return cancel_; }
  void wait(const std::shared_ptr<Record>& record);

 private:
  void run();

  const uint64_t id_;
  const void* const context_;
  mutable std::mutex mutex_;
  std::condition_variable more_;      // queue_ grew, or closing_
  std::condition_variable finished_;  // done_ grew
  std::deque<Task> queue_;
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
  bool closing_ = false;
  bool stop_on_failure_ = false;
  bool stopped_ = false;
  Status failure_;
  int64_t failures_ = 0;
  std::shared_ptr<Record> waiting_on_;
  std::atomic<bool> dropped_{false};
  CancelToken cancel_;
  std::thread thread_;
};

struct Event {
  static constexpr HandleKind kKind = HandleKind::event;
  explicit Event(uint32_t f) : flags(f) {}
  const uint32_t flags;
  std::mutex mutex;                // guards newest
  std::shared_ptr<Record> newest;  // null: never recorded, or reset
  // Streams that still wait for it; shared with their tasks.
  std::shared_ptr<std::atomic<int64_t>> waits = std::make_shared<std::atomic<int64_t>>(0);
};

// True in a child forked after any stream had a thread: none of them came along.
bool streams_lost_in_fork();
Status check_not_forked();

// Whether the calling thread belongs to a stream of ours.
bool on_stream_thread();
uint64_t current_stream_id();  // 0: none

// The stream of a handle, null being the default one of the thread's context.
Status find_stream(aclrtStream handle, std::shared_ptr<Stream>* stream);
Status find_event(aclrtEvent handle, std::shared_ptr<Event>* event);

// Ends what aclrtSubscribeReport began for a stream that is going away.
void forget_subscription(const Stream& stream);

}  // namespace logitless::ascend
