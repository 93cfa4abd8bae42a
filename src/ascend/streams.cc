// SPDX-License-Identifier: Apache-2.0
// The C functions about streams, events and callbacks.
#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <system_error>

#include "device.h"
#include "stream.h"

namespace logitless::ascend {
namespace {

Status is_null(const char* name) { return failure(ACL_ERROR_INVALID_PARAM, name, ": is null"); }

Status check_timeout(int32_t timeout) {
  if (timeout >= -1) return {};
  return failure(ACL_ERROR_RT_PARAM_INVALID, "timeout: is ", timeout,
                 ", must be at least -1 (milliseconds, -1 = for ever)");
}

Status check_may_wait(const Stream& stream) {
  if (!stream.is_current()) return {};
  return failure(ACL_ERROR_RT_INTERNAL_ERROR, "stream: its own callback would wait for it");
}

Status create_stream(aclrtStream* out) {
  if (out == nullptr) return is_null("stream");
  if (Status status = check_not_forked(); !status.ok()) return status;
  void* context = nullptr;
  if (Status status = current_context(nullptr, &context); !status.ok()) return status;
  try {
    *out = Registry::instance().add(std::make_shared<Stream>(context));
  } catch (const std::system_error&) {
    return failure(ACL_ERROR_RT_NO_STREAM_RESOURCE, "the system gives no thread for it");
  }
  return {};
}

Status destroy_stream(aclrtStream handle, bool drop) {
  if (handle == nullptr) return is_null("stream");
  std::shared_ptr<Stream> stream;
  if (Status status = find_stream(handle, &stream); !status.ok()) return status;
  if (Status status = check_may_wait(*stream); !status.ok()) return status;
  // Of two who destroy it at once, one gets it.
  stream = Registry::instance().take<Stream>(handle);
  if (!stream) return find_stream(handle, &stream);
  if (drop) forget_subscription(*stream);
  stream->close(drop);
  forget_subscription(*stream);
  return {};
}

Status synchronize_stream(aclrtStream handle, int32_t timeout) {
  if (Status status = check_timeout(timeout); !status.ok()) return status;
  std::shared_ptr<Stream> stream;
  if (Status status = find_stream(handle, &stream); !status.ok()) return status;
  if (Status status = check_may_wait(*stream); !status.ok()) return status;
  if (!stream->wait_idle(deadline_after(timeout))) {
    return failure(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "timeout: stream ", stream->id(),
                   " is not done after ", timeout, " ms");
  }
  return stream->take_failure();
}

constexpr uint32_t kAllStreamFlags = ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC |
                                     ACL_STREAM_PERSISTENT | ACL_STREAM_HUGE |
                                     ACL_STREAM_CPU_SCHEDULE | ACL_STREAM_DEVICE_USE_ONLY;
constexpr uint32_t kAllEventFlags = ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS |
                                    ACL_EVENT_TIME_LINE | ACL_EVENT_DEVICE_USE_ONLY |
                                    ACL_EVENT_EXTERNAL | ACL_EVENT_IPC;

Status create_event(aclrtEvent* out, uint32_t flag) {
  if (out == nullptr) return is_null("event");
  if ((flag & ~kAllEventFlags) != 0) {
    return failure(ACL_ERROR_RT_PARAM_INVALID, "flag: is ", flag,
                   ", must be made of the ACL_EVENT_ flags, ", kAllEventFlags);
  }
  if (Status status = check_not_forked(); !status.ok()) return status;
  if (Status status = current_context(nullptr); !status.ok()) return status;
  *out = Registry::instance().add(std::make_shared<Event>(flag));
  return {};
}

Status check_not_ipc(const Event& event, const char* name) {
  if ((event.flags & ACL_EVENT_IPC) == 0) return {};
  return failure(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, name,
                 ": was created with ACL_EVENT_IPC, which cannot be reset, queried or timed");
}

std::shared_ptr<Record> newest_of(Event& event) {
  const std::lock_guard<std::mutex> lock(event.mutex);
  return event.newest;
}

// True for one never recorded, too.
Status query_event(aclrtEvent handle, bool* complete) {
  std::shared_ptr<Event> event;
  if (Status status = find_event(handle, &event); !status.ok()) return status;
  if (Status status = check_not_ipc(*event, "event"); !status.ok()) return status;
  const std::shared_ptr<Record> newest = newest_of(*event);
  *complete = !newest || newest->reached();
  return {};
}

Status synchronize_event(aclrtEvent handle, int32_t timeout) {
  if (Status status = check_timeout(timeout); !status.ok()) return status;
  std::shared_ptr<Event> event;
  if (Status status = find_event(handle, &event); !status.ok()) return status;
  const std::shared_ptr<Record> newest = newest_of(*event);
  if (!newest || newest->reached()) return {};
  if (newest->stream_id() == current_stream_id()) {
    return failure(ACL_ERROR_RT_INTERNAL_ERROR, "event: its stream's own callback waits for it");
  }
  if (!newest->wait(deadline_after(timeout))) {
    return failure(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "timeout: the event is not reached after ",
                   timeout, " ms");
  }
  return {};
}

// ---- callbacks that run on a thread of the client's
// -----------------------------------------------

struct Report {
  aclrtCallback callback;
  void* user_data;
  std::shared_ptr<Record> over;  // of a blocking one: the stream waits for it
  uint64_t stream_id;
};

struct Subscriber {
  std::deque<Report> reports;
  int64_t streams = 0;
};

struct Subscriptions {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, Subscriber> by_thread;
  std::map<uint64_t, uint64_t> thread_of_stream;

  static Subscriptions& instance() {
    static Subscriptions* const subscriptions = new Subscriptions;
    return *subscriptions;
  }

  // With the mutex held. Callbacks not yet run are dropped, and the stream no longer waits for
  // them.
  void end(uint64_t stream_id) {
    const auto subscription = thread_of_stream.find(stream_id);
    if (subscription == thread_of_stream.end()) return;
    const auto subscriber = by_thread.find(subscription->second);
    thread_of_stream.erase(subscription);
    std::deque<Report>& reports = subscriber->second.reports;
    for (const Report& report : reports) {
      if (report.stream_id == stream_id && report.over) report.over->reach(false);
    }
    std::erase_if(reports, [&](const Report& report) { return report.stream_id == stream_id; });
    if (--subscriber->second.streams == 0) by_thread.erase(subscriber);
    changed.notify_all();
  }
};

Status launch_callback(aclrtCallback callback, void* user_data, bool block, aclrtStream handle) {
  std::shared_ptr<Stream> stream;
  if (Status status = find_stream(handle, &stream); !status.ok()) return status;
  const uint64_t stream_id = stream->id();
  Subscriptions& subscriptions = Subscriptions::instance();
  {
    const std::lock_guard<std::mutex> lock(subscriptions.mutex);
    if (subscriptions.thread_of_stream.count(stream_id) == 0) {
      return failure(ACL_ERROR_RT_STREAM_NO_CB_REG,
                     "stream: no thread is subscribed to it, call aclrtSubscribeReport first");
    }
  }
  const auto over = block ? std::make_shared<Record>(stream_id) : nullptr;
  return stream->enqueue({[=](Stream& self) -> Status {
    Subscriptions& subscribed = Subscriptions::instance();
    {
      const std::lock_guard<std::mutex> lock(subscribed.mutex);
      const auto thread = subscribed.thread_of_stream.find(stream_id);
      if (thread == subscribed.thread_of_stream.end()) return {};
      subscribed.by_thread[thread->second].reports.push_back(
          {callback, user_data, over, stream_id});
    }
    subscribed.changed.notify_all();
    if (over) self.wait(over);
    return {};
  }});
}

Status process_report(int32_t timeout) {
  if (Status status = check_timeout(timeout); !status.ok()) return status;
  if (Status status = check_not_forked(); !status.ok()) return status;
  const uint64_t thread = static_cast<uint64_t>(pthread_self());
  Subscriptions& subscriptions = Subscriptions::instance();
  Report report = {};
  {
    std::unique_lock<std::mutex> lock(subscriptions.mutex);
    const auto reports = [&]() -> std::deque<Report>* {
      const auto subscriber = subscriptions.by_thread.find(thread);
      return subscriber == subscriptions.by_thread.end() ? nullptr : &subscriber->second.reports;
    };
    const auto over = [&] { return reports() == nullptr || !reports()->empty(); };
    const Deadline deadline = deadline_after(timeout);
    if (!deadline) {
      subscriptions.changed.wait(lock, over);
    } else if (!subscriptions.changed.wait_until(lock, *deadline, over)) {
      return failure(ACL_ERROR_RT_REPORT_TIMEOUT, "timeout: no callback after ", timeout, " ms");
    }
    if (reports() == nullptr) {
      return failure(ACL_ERROR_RT_THREAD_SUBSCRIBE,
                     "this thread is subscribed to no stream, call aclrtSubscribeReport first");
    }
    report = std::move(reports()->front());
    reports()->pop_front();
  }
  Status status;
  try {
    report.callback(report.user_data);
  } catch (...) {
    status = failure(ACL_ERROR_RT_INTERNAL_ERROR, "an exception left the callback");
  }
  if (report.over) report.over->reach(true);
  return status;
}

}  // namespace

Status find_stream(aclrtStream handle, std::shared_ptr<Stream>* stream) {
  if (Status status = check_not_forked(); !status.ok()) return status;
  if (handle == nullptr) {
    std::shared_ptr<Context> context;
    if (Status status = current_context(&context); !status.ok()) return status;
    *stream = context->default_stream;
    return {};
  }
  *stream = Registry::instance().find<Stream>(handle);
  if (*stream) return {};
  return failure(ACL_ERROR_RT_INVALID_HANDLE,
                 "stream: is not a living stream (destroyed, or not from here)");
}

Status find_event(aclrtEvent handle, std::shared_ptr<Event>* event) {
  if (handle == nullptr) return is_null("event");
  if (Status status = check_not_forked(); !status.ok()) return status;
  *event = Registry::instance().find<Event>(handle);
  if (*event) return {};
  return failure(ACL_ERROR_RT_INVALID_HANDLE,
                 "event: is not a living event (destroyed, or not from here)");
}

void forget_subscription(const Stream& stream) {
  Subscriptions& subscriptions = Subscriptions::instance();
  const std::lock_guard<std::mutex> lock(subscriptions.mutex);
  subscriptions.end(stream.id());
}

}  // namespace logitless::ascend

using namespace logitless::ascend;

extern "C" {

aclError aclrtCreateStream(aclrtStream* stream) {
  return runtime_call(__func__, [&] { return create_stream(stream); });
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t flag) {
  return runtime_call(__func__, [&]() -> Status {
    if ((flag & ~kAllStreamFlags) != 0) {
      return failure(ACL_ERROR_RT_PARAM_INVALID, "flag: is ", flag,
                     ", must be made of the ACL_STREAM_ flags, ", kAllStreamFlags);
    }
    return create_stream(stream);
  });
}

aclError aclrtDestroyStream(aclrtStream stream) {
  return runtime_call(__func__, [&] { return destroy_stream(stream, false); });
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return runtime_call(__func__, [&] { return destroy_stream(stream, true); });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  return runtime_call(__func__, [&] { return synchronize_stream(stream, -1); });
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  return runtime_call(__func__, [&] { return synchronize_stream(stream, timeout); });
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  return runtime_call(__func__, [&]() -> Status {
    if (status == nullptr) return is_null("status");
    std::shared_ptr<Stream> found;
    if (Status failed = find_stream(stream, &found); !failed.ok()) return failed;
    *status = found->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return {};
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return runtime_call(__func__, [&]() -> Status {
    std::shared_ptr<Event> awaited;
    if (Status status = find_event(event, &awaited); !status.ok()) return status;
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    const std::shared_ptr<Record> newest = newest_of(*awaited);
    if (!newest || newest->reached()) return {};
    // Counted until the task is over or dropped: the count lives in what it holds.
    struct Waiting {
      explicit Waiting(std::shared_ptr<std::atomic<int64_t>> c) : count(std::move(c)) { ++*count; }
      ~Waiting() { --*count; }
      std::shared_ptr<std::atomic<int64_t>> count;
    };
    const auto waiting = std::make_shared<Waiting>(awaited->waits);
    return found->enqueue({[newest, waiting](Stream& self) -> Status {
                             self.wait(newest);
                             return {};
                           },
                           nullptr, true});
  });
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* streamId) {
  return runtime_call(__func__, [&]() -> Status {
    if (streamId == nullptr) return is_null("streamId");
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    *streamId = static_cast<int32_t>(found->id());
    return {};
  });
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
  return runtime_call(__func__, [&]() -> Status {
    if (mode > ACL_STOP_ON_FAILURE) {
      return failure(ACL_ERROR_RT_PARAM_INVALID, "mode: is ", mode,
                     ", must be 0 (continue) or 1 (stop)");
    }
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    found->set_stop_on_failure(mode == ACL_STOP_ON_FAILURE);
    return {};
  });
}

aclError aclrtLaunchCallback(aclrtCallback fn, void* userData, aclrtCallbackBlockType blockType,
                             aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    if (fn == nullptr) return is_null("fn");
    const int type = static_cast<int>(blockType);
    if (type != ACL_CALLBACK_NO_BLOCK && type != ACL_CALLBACK_BLOCK) {
      return failure(ACL_ERROR_INVALID_PARAM, "blockType: is ", type, ", must be 0 or 1");
    }
    return launch_callback(fn, userData, type == ACL_CALLBACK_BLOCK, stream);
  });
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void* args) {
  return runtime_call(__func__, [&]() -> Status {
    if (fn == nullptr) return is_null("fn");
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    return found->enqueue({[=](Stream&) -> Status {
      fn(args);
      return {};
    }});
  });
}

aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    Subscriptions& subscriptions = Subscriptions::instance();
    const std::lock_guard<std::mutex> lock(subscriptions.mutex);
    if (!subscriptions.thread_of_stream.emplace(found->id(), threadId).second) {
      return failure(ACL_ERROR_RT_STREAM_SUBSCRIBE, "stream: a thread is subscribed to it already");
    }
    ++subscriptions.by_thread[threadId].streams;
    subscriptions.changed.notify_all();
    return {};
  });
}

aclError aclrtProcessReport(int32_t timeout) {
  return runtime_call(__func__, [&] { return process_report(timeout); });
}

aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    Subscriptions& subscriptions = Subscriptions::instance();
    const std::lock_guard<std::mutex> lock(subscriptions.mutex);
    const auto subscription = subscriptions.thread_of_stream.find(found->id());
    if (subscription == subscriptions.thread_of_stream.end() || subscription->second != threadId) {
      return failure(ACL_ERROR_RT_THREAD_SUBSCRIBE, "threadId: thread ", threadId,
                     " is not subscribed to this stream");
    }
    subscriptions.end(found->id());
    return {};
  });
}

aclError aclrtCreateEvent(aclrtEvent* event) {
  return runtime_call(__func__, [&] {
    return create_event(event,
                        ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS | ACL_EVENT_TIME_LINE);
  });
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return runtime_call(__func__, [&] { return create_event(event, flag); });
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return runtime_call(__func__, [&] { return create_event(event, flag); });
}

aclError aclrtDestroyEvent(aclrtEvent event) {
  return runtime_call(__func__, [&]() -> Status {
    std::shared_ptr<Event> found;
    if (Status status = find_event(event, &found); !status.ok()) return status;
    // Streams that wait for it hold what they need.
    Registry::instance().take<Event>(event);
    return {};
  });
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    std::shared_ptr<Event> recorded;
    if (Status status = find_event(event, &recorded); !status.ok()) return status;
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    auto record = std::make_shared<Record>(found->id());
    // Under the event's lock, so that of two threads that record it the later one also stays.
    const std::lock_guard<std::mutex> lock(recorded->mutex);
    if (Status status = found->enqueue({{}, record, true}); !status.ok()) return status;
    recorded->newest = std::move(record);
    return {};
  });
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    std::shared_ptr<Event> reset;
    if (Status status = find_event(event, &reset); !status.ok()) return status;
    if (Status status = check_not_ipc(*reset, "event"); !status.ok()) return status;
    std::shared_ptr<Stream> found;
    if (Status status = find_stream(stream, &found); !status.ok()) return status;
    const std::shared_ptr<Record> old = newest_of(*reset);
    return found->enqueue({[reset, old](Stream&) -> Status {
                             const std::lock_guard<std::mutex> lock(reset->mutex);
                             if (reset->newest == old) reset->newest = nullptr;
                             return {};
                           },
                           nullptr, true});
  });
}

aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus* status) {
  return runtime_call(__func__, [&]() -> Status {
    if (status == nullptr) return is_null("status");
    bool complete = false;
    if (Status failed = query_event(event, &complete); !failed.ok()) return failed;
    *status = complete ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
    return {};
  });
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  return runtime_call(__func__, [&]() -> Status {
    if (status == nullptr) return is_null("status");
    bool complete = false;
    if (Status failed = query_event(event, &complete); !failed.ok()) return failed;
    *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return {};
  });
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  return runtime_call(__func__, [&]() -> Status {
    if (status == nullptr) return is_null("status");
    std::shared_ptr<Event> found;
    if (Status failed = find_event(event, &found); !failed.ok()) return failed;
    if (Status failed = check_not_ipc(*found, "event"); !failed.ok()) return failed;
    *status = found->waits->load() == 0 ? ACL_EVENT_WAIT_STATUS_COMPLETE
                                        : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return {};
  });
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return runtime_call(__func__, [&] { return synchronize_event(event, -1); });
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) {
  return runtime_call(__func__, [&] { return synchronize_event(event, timeout); });
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent startEvent, aclrtEvent endEvent) {
  return runtime_call(__func__, [&]() -> Status {
    if (ms == nullptr) return is_null("ms");
    const struct {
      const char* name;
      aclrtEvent handle;
    } events[] = {{"startEvent", startEvent}, {"endEvent", endEvent}};
    for (const auto& event : events) {
      if (event.handle == nullptr) return is_null(event.name);
    }
    std::shared_ptr<Event> found[2];
    for (int i = 0; i < 2; ++i) {
      if (Status status = find_event(events[i].handle, &found[i]); !status.ok()) {
        return {status.code, text(events[i].name, " as ", status.message)};
      }
    }
    Clock::time_point times[2];
    for (int i = 0; i < 2; ++i) {
      if (Status status = check_not_ipc(*found[i], events[i].name); !status.ok()) return status;
      const std::shared_ptr<Record> newest = newest_of(*found[i]);
      const auto time = newest ? newest->time() : std::nullopt;
      if ((found[i]->flags & ACL_EVENT_TIME_LINE) == 0 || !time) {
        return failure(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, events[i].name,
                       ": has no time stamp, must be created with ACL_EVENT_TIME_LINE, recorded, "
                       "and reached");
      }
      times[i] = *time;
    }
    if (times[1] < times[0]) {
      return failure(ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL,
                     "endEvent: was reached before startEvent");
    }
    *ms = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
    return {};
  });
}

}  // extern "C"
