// SPDX-License-Identifier: Apache-2.0
// Handles that clients hold are numbers that were never an address and are never used twice, so a
// destroyed, foreign or invented one is not found, whatever it points to. Nothing is dereferenced
// that did not come out of the registry.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace logitless::ascend {

enum class HandleKind : uint8_t {
  tensor,
  scalar,
  int_array,
  float_array,
  bool_array,
  tensor_list,
  scalar_list,
  executor,
  stream,
  event,
  context,
};

// Object types name their kind as T::kKind.
class Registry {
 public:
  // Never destroyed: static destructors of clients and worker threads may outlive ours.
  static Registry& instance();

  template <class T>
  void* add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uintptr_t id = kTag | (++last_ << 4);
    objects_.emplace(id, Entry{T::kKind, std::move(object)});
    return reinterpret_cast<void*>(id);
  }

  template <class T>
  std::shared_ptr<T> find(const void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return find_locked<T>(handle);
  }

  // The object, no longer to be found by anyone else.
  template <class T>
  std::shared_ptr<T> take(const void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<T> object = find_locked<T>(handle);
    if (object) objects_.erase(reinterpret_cast<uintptr_t>(handle));
    return object;
  }

  template <class T>
  std::vector<std::shared_ptr<T>> all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> found;
    for (const auto& [id, entry] : objects_) {
      if (entry.kind == T::kKind) found.push_back(std::static_pointer_cast<T>(entry.object));
    }
    return found;
  }

  // All for which condition(object) holds, no longer to be found.
  template <class T, class Condition>
  std::vector<std::shared_ptr<T>> take_if(const Condition& condition) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> taken;
    for (auto at = objects_.begin(); at != objects_.end();) {
      std::shared_ptr<T> object;
      if (at->second.kind == T::kKind) object = std::static_pointer_cast<T>(at->second.object);
      if (object && condition(*object)) {
        taken.push_back(std::move(object));
        at = objects_.erase(at);
      } else {
        ++at;
      }
    }
    return taken;
  }

  // Runs body(lookup) with the registry locked, where lookup.find<T>(handle) gives a pointer or
  // null and lookup.take<T>(handle) as above. What tensors and executors hold is only read and
  // written here: short, and safe in a forked child, which finds this mutex (and no other) free.
  class Lookup {
   public:
    template <class T>
    T* find(const void* handle) const {
      return registry_.find_locked<T>(handle).get();
    }
    template <class T>
    std::shared_ptr<T> take(const void* handle) const {
      std::shared_ptr<T> object = registry_.find_locked<T>(handle);
      if (object) registry_.objects_.erase(reinterpret_cast<uintptr_t>(handle));
      return object;
    }
    template <class T>
    std::shared_ptr<T> share(const void* handle) const {
      return registry_.find_locked<T>(handle);
    }

   private:
    friend class Registry;
    explicit Lookup(Registry& registry) : registry_(registry) {}
    Registry& registry_;
  };
  template <class Body>
  auto with_lock(const Body& body) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return body(Lookup(*this));
  }

  std::mutex& mutex() { return mutex_; }

 private:
  struct Entry {
    HandleKind kind;
    std::shared_ptr<void> object;
  };
  // Not a canonical address on x86-64 or AArch64, and a multiple of 16 as an allocator's would be.
  static constexpr uintptr_t kTag = uintptr_t{0x4c4c} << 48;

  template <class T>
  std::shared_ptr<T> find_locked(const void* handle) {
    const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == objects_.end() || found->second.kind != T::kKind) return nullptr;
    return std::static_pointer_cast<T>(found->second.object);
  }

  std::mutex mutex_;
  uintptr_t last_ = 0;
  std::unordered_map<uintptr_t, Entry> objects_;
};

}  // namespace logitless::ascend
