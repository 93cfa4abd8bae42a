// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace logitless::ascend {
namespace {

std::atomic<uint64_t> last_stream_id{0};
thread_local const Stream* current_stream = nullptr;

Status guarded(const std::function<Status(Stream&)>& work, Stream& stream) {
  try {
    return work(stream);
  } catch (const std::bad_alloc&) {
    return failure(ACL_ERROR_BAD_ALLOC, "out of host memory in the stream's work");
  } catch (...) {
    return failure(ACL_ERROR_RT_INTERNAL_ERROR, "an exception left the stream's work");
  }
}

}  // namespace

Deadline deadline_after(int32_t timeout_ms) {
  if (timeout_ms < 0) return {};
  return Clock::now() + std::chrono::milliseconds(timeout_ms);
}

void Record::reach(bool with_time) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    if (with_time) time_ = Clock::now();
  }
  changed_.notify_all();
}

bool Record::reached() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

std::optional<Clock::time_point> Record::time() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

bool Record::wait(const Deadline& deadline, const std::atomic<bool>* abandon) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto over = [&] { return reached_ || (abandon != nullptr && abandon->load()); };
  if (deadline) {
    changed_.wait_until(lock, *deadline, over);
  } else {
    changed_.wait(lock, over);
  }
  return reached_;
}

void Record::wake() {
  // The lock closes the gap between a waiter's look at *abandon and its sleep.
  { const std::lock_guard<std::mutex> lock(mutex_); }
  changed_.notify_all();
}

Stream::Stream(const void* context) : id_(++last_stream_id), context_(context) {
  // Signals are for the client's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), text("logitless-", id_).substr(0, 15).c_str());
}

Stream::~Stream() {
  if (thread_.joinable()) close(true);
}

bool Stream::any_started() { return last_stream_id.load() > 0; }

bool Stream::is_current() const { return current_stream == this; }

bool on_stream_thread() { return current_stream != nullptr; }

uint64_t current_stream_id() { return current_stream != nullptr ? current_stream->id() : 0; }

Status Stream::enqueue(Task task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return failure(ACL_ERROR_RT_INVALID_HANDLE, "stream: is being destroyed");
    queue_.push_back(std::move(task));
    ++enqueued_;
  }
  more_.notify_one();
  return {};
}

bool Stream::wait_idle(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t goal = enqueued_;
  const auto over = [&] { return done_ >= goal; };
  if (!deadline) {
    finished_.wait(lock, over);
    return true;
  }
  return finished_.wait_until(lock, *deadline, over);
}

bool Stream::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ == enqueued_;
}

Status Stream::take_failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failures_ == 0) return {};
  Status told = failure_;
  if (failures_ > 1) told.message += text(" (and ", failures_ - 1, " later failures)");
  if (!stopped_) {
    failure_ = {};
    failures_ = 0;
  }
  return told;
}

void Stream::set_stop_on_failure(bool stop) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_on_failure_ = stop;
  stopped_ = false;
}

void Stream::close(bool drop) {
  std::deque<Task> dropped;
  std::shared_ptr<Record> waiting_on;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    if (drop) {
      dropped_.store(true);
      cancel_.cancel();
      dropped.swap(queue_);
      done_ += dropped.size();
      waiting_on = waiting_on_;
    }
  }
  more_.notify_all();
  finished_.notify_all();
  if (waiting_on) waiting_on->wake();
  for (Task& task : dropped) {
    task.work = nullptr;
    if (task.over) task.over->reach(false);
  }
  thread_.join();
}

void Stream::wait(const std::shared_ptr<Record>& record) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_on_ = record;
  }
  record->wait({}, &dropped_);
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_on_ = nullptr;
}

void Stream::run() {
  current_stream = this;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    more_.wait(lock, [&] { return !queue_.empty() || closing_; });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    const bool skip = stopped_ && !task.even_when_stopped;
    lock.unlock();
    Status outcome;
    if (task.work && !skip) outcome = guarded(task.work, *this);
    // What the work holds is gone before anybody hears that it is over.
    task.work = nullptr;
    if (task.over) task.over->reach(true);
    lock.lock();
    ++done_;
    if (!outcome.ok()) {
      if (failures_++ == 0) failure_ = std::move(outcome);
      stopped_ = stop_on_failure_;
    }
    finished_.notify_all();
  }
}

}  // namespace logitless::ascend
