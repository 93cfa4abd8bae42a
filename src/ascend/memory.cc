// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "device.h"
#include "status.h"
#include "stream.h"

namespace logitless::ascend {

Allocations& Allocations::instance() {
  static Allocations* const allocations = new Allocations;
  return *allocations;
}

void* Allocations::allocate(size_t bytes, MemoryKind kind, bool huge) {
  constexpr size_t kHugePage = size_t{2} << 20;
  // Mapped rather than taken from the heap: it goes back to the system at once, and asking for the
  // impossible is an error under every allocator.
  const size_t slack = huge ? kHugePage : 0;
  if (bytes > std::numeric_limits<size_t>::max() - slack) return nullptr;
  void* const mapped =
      mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(mapped);
  if (huge) {
    const size_t head = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (head > 0) munmap(begin, head);
    begin += head;
    if (slack > head) munmap(begin + bytes, slack - head);
    madvise(begin, bytes, MADV_HUGEPAGE);
  }
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.emplace(reinterpret_cast<uintptr_t>(begin), Block{bytes, kind});
  } catch (...) {
    munmap(begin, bytes);
    throw;
  }
  return begin;
}

bool Allocations::free(void* address, MemoryKind kind) {
  size_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<uintptr_t>(address));
    if (found == blocks_.end() || found->second.kind != kind) return false;
    bytes = found->second.bytes;
    blocks_.erase(found);
  }
  munmap(address, bytes);
  return true;
}

bool Allocations::is_ours(const void* address) const {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return false;
  --after;
  return at - after->first < after->second.bytes;
}

namespace {

// extra: bytes added before rounding up to 2 MiB, so that a read a little too far hits memory.
Status allocate_device(void** out, size_t size, aclrtMemMallocPolicy policy, size_t extra) {
  if (out == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "devPtr: is null");
  if (size == 0) return failure(ACL_ERROR_INVALID_PARAM, "size: is 0, must be at least 1");
  constexpr uint32_t kModifiers = ACL_MEM_TYPE_LOW_BAND_WIDTH | ACL_MEM_TYPE_HIGH_BAND_WIDTH |
                                  ACL_MEM_ACCESS_USER_SPACE_READONLY;
  const uint32_t base = static_cast<uint32_t>(policy) & ~kModifiers;
  if (base > ACL_MEM_MALLOC_HUGE1G_ONLY_P2P) {
    return failure(ACL_ERROR_INVALID_PARAM, "policy: is ", static_cast<uint32_t>(policy),
                   ", must be an aclrtMemMallocPolicy");
  }
  if (Status status = current_context(nullptr); !status.ok()) return status;
  constexpr size_t kPage = size_t{2} << 20;
  void* memory = nullptr;
  if (size <= std::numeric_limits<size_t>::max() - extra - kPage) {
    const bool normal =
        base == ACL_MEM_MALLOC_NORMAL_ONLY || base == ACL_MEM_MALLOC_NORMAL_ONLY_P2P;
    // Huge pages for small blocks would cost 2 MiB of real memory each.
    const bool huge = !normal && size >= kPage;
    memory = Allocations::instance().allocate((size + extra + kPage - 1) / kPage * kPage,
                                              MemoryKind::device, huge);
  }
  if (memory == nullptr) {
    return failure(ACL_ERROR_RT_MEMORY_ALLOCATION, "size: ", size,
                   " bytes are more than there is memory for");
  }
  *out = memory;
  return {};
}

Status release(void* address, const char* name, MemoryKind kind, const char* allocator) {
  if (address == nullptr) return failure(ACL_ERROR_INVALID_PARAM, name, ": is null");
  if (!Allocations::instance().free(address, kind)) {
    return failure(ACL_ERROR_RT_PARAM_INVALID, name, ": ", address, " is not an address from ",
                   allocator, ", or was freed already");
  }
  return {};
}

bool is_copy_kind(aclrtMemcpyKind kind) {
  const int value = static_cast<int>(kind);
  return value >= ACL_MEMCPY_HOST_TO_HOST && value <= ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE;
}

Status check_pointers(const void* dst, const void* src, aclrtMemcpyKind kind) {
  if (dst == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "dst: is null");
  if (src == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "src: is null");
  if (!is_copy_kind(kind)) {
    return failure(ACL_ERROR_INVALID_PARAM, "kind: is ", static_cast<int>(kind),
                   ", must be 0 to 5");
  }
  return {};
}

// count > 0.
Status check_copy(const void* dst, size_t destMax, const void* src, size_t count,
                  aclrtMemcpyKind kind) {
  if (Status status = check_pointers(dst, src, kind); !status.ok()) return status;
  if (count > destMax) {
    return failure(ACL_ERROR_RT_PARAM_INVALID, "count: is ", count,
                   ", must be at most destMax = ", destMax);
  }
  return {};
}

// width and height > 0.
Status check_copy_2d(const void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                     aclrtMemcpyKind kind) {
  if (Status status = check_pointers(dst, src, kind); !status.ok()) return status;
  if (width > dpitch || width > spitch) {
    return failure(ACL_ERROR_RT_PARAM_INVALID, "width: is ", width,
                   ", must be at most dpitch = ", dpitch, " and spitch = ", spitch);
  }
  return {};
}

Status check_fill(const void* devPtr, size_t maxCount, size_t count) {
  if (devPtr == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "devPtr: is null");
  if (count > maxCount) {
    return failure(ACL_ERROR_RT_PARAM_INVALID, "count: is ", count,
                   ", must be at most maxCount = ", maxCount);
  }
  return {};
}

void copy_2d(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
             size_t height) {
  for (size_t row = 0; row < height; ++row) {
    std::memmove(static_cast<char*>(dst) + row * dpitch,
                 static_cast<const char*>(src) + row * spitch, width);
  }
}

// Host memory that is not from aclrtMallocHost may vanish as soon as the call returns. What kind
// calls device memory may be any pointer and is trusted to stay.
bool must_be_over_on_return(const void* dst, const void* src, aclrtMemcpyKind kind) {
  const Allocations& allocations = Allocations::instance();
  switch (kind) {
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
      return false;
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
      return !allocations.is_ours(src);
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return !allocations.is_ours(dst);
    default:
      return !allocations.is_ours(src) || !allocations.is_ours(dst);
  }
}

Status enqueue_copy(aclrtStream handle, bool wait, std::function<Status(Stream&)> work) {
  std::shared_ptr<Stream> stream;
  if (Status status = find_stream(handle, &stream); !status.ok()) return status;
  if (!wait) return stream->enqueue({std::move(work)});
  if (stream->is_current()) {
    return failure(ACL_ERROR_RT_INTERNAL_ERROR,
                   "stream: its own callback would wait for it to copy pageable host memory");
  }
  const auto over = std::make_shared<Record>(stream->id());
  if (Status status = stream->enqueue({std::move(work), over}); !status.ok()) return status;
  over->wait({});
  return {};
}

// Bytes, or nothing when the file has no such line, or says "max".
std::optional<uint64_t> number_in(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (!key.empty() && word != key) continue;
    if (!key.empty() && !(file >> word)) return {};
    if (word.empty() || word.find_first_not_of("0123456789") != std::string::npos) return {};
    if (word.size() > 18) return {};  // version 1 groups say "no limit" like this
    return std::stoull(word) * (key.empty() ? 1 : 1024);
  }
  return {};
}

void memory_of_this_process(uint64_t* free, uint64_t* total) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  *total = number_in("/proc/meminfo", "MemTotal:")
               .value_or(page * static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)));
  *free = number_in("/proc/meminfo", "MemAvailable:")
              .value_or(page * static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)));
  const char* const groups[][2] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
       "/sys/fs/cgroup/memory/memory.usage_in_bytes"},
  };
  for (const auto& [limit_file, usage_file] : groups) {
    const std::optional<uint64_t> limit = number_in(limit_file, "");
    if (!limit || *limit >= *total) continue;
    const uint64_t usage = number_in(usage_file, "").value_or(0);
    *total = *limit;
    *free = std::min(*free, *limit - std::min(*limit, usage));
  }
  *free = std::min(*free, *total);
}

}  // namespace
}  // namespace logitless::ascend

using namespace logitless::ascend;

extern "C" {

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy policy) {
  return runtime_call(__func__, [&] { return allocate_device(devPtr, size, policy, 32); });
}

aclError aclrtMallocAlign32(void** devPtr, size_t size, aclrtMemMallocPolicy policy) {
  return runtime_call(__func__, [&] { return allocate_device(devPtr, size, policy, 0); });
}

aclError aclrtMallocCached(void** devPtr, size_t size, aclrtMemMallocPolicy policy) {
  return runtime_call(__func__, [&] { return allocate_device(devPtr, size, policy, 32); });
}

aclError aclrtMallocWithCfg(void** devPtr, size_t size, aclrtMemMallocPolicy policy,
                            aclrtMallocConfig* cfg) {
  return runtime_call(__func__, [&]() -> Status {
    if (cfg != nullptr && cfg->numAttrs > 0) {
      if (cfg->attrs == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "cfg: attrs is null");
      for (size_t i = 0; i < cfg->numAttrs; ++i) {
        const aclrtMallocAttribute& attribute = cfg->attrs[i];
        if (attribute.attr == ACL_RT_MEM_ATTR_DEVICE_ID && attribute.value.deviceId != 0) {
          return failure(ACL_ERROR_RT_INVALID_DEVICEID, "cfg: device id is ",
                         attribute.value.deviceId, ", must be 0");
        }
      }
    }
    return allocate_device(devPtr, size, policy, 32);
  });
}

aclError aclrtFree(void* devPtr) {
  return runtime_call(__func__,
                      [&] { return release(devPtr, "devPtr", MemoryKind::device, "aclrtMalloc"); });
}

aclError aclrtMallocHost(void** hostPtr, size_t size) {
  return runtime_call(__func__, [&]() -> Status {
    if (hostPtr == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "hostPtr: is null");
    if (size == 0) return failure(ACL_ERROR_INVALID_PARAM, "size: is 0, must be at least 1");
    if (Status status = current_context(nullptr); !status.ok()) return status;
    constexpr size_t kPage = 4096;
    void* memory = nullptr;
    if (size <= std::numeric_limits<size_t>::max() - kPage) {
      memory = Allocations::instance().allocate((size + kPage - 1) / kPage * kPage,
                                                MemoryKind::host, false);
    }
    if (memory == nullptr) {
      return failure(ACL_ERROR_RT_MEMORY_ALLOCATION, "size: ", size,
                     " bytes are more than there is memory for");
    }
    *hostPtr = memory;
    return {};
  });
}

aclError aclrtFreeHost(void* hostPtr) {
  return runtime_call(
      __func__, [&] { return release(hostPtr, "hostPtr", MemoryKind::host, "aclrtMallocHost"); });
}

aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count,
                     aclrtMemcpyKind kind) {
  return runtime_call(__func__, [&]() -> Status {
    if (count == 0) return {};
    if (Status status = check_copy(dst, destMax, src, count, kind); !status.ok()) return status;
    std::memmove(dst, src, count);
    return {};
  });
}

aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count,
                          aclrtMemcpyKind kind, aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    if (count == 0) return {};
    if (Status status = check_copy(dst, destMax, src, count, kind); !status.ok()) return status;
    return enqueue_copy(stream, must_be_over_on_return(dst, src, kind), [=](Stream&) -> Status {
      std::memmove(dst, src, count);
      return {};
    });
  });
}

aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count) {
  return runtime_call(__func__, [&]() -> Status {
    if (count == 0) return {};
    if (Status status = check_fill(devPtr, maxCount, count); !status.ok()) return status;
    std::memset(devPtr, value, count);
    return {};
  });
}

aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count,
                          aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    if (count == 0) return {};
    if (Status status = check_fill(devPtr, maxCount, count); !status.ok()) return status;
    return enqueue_copy(stream, false, [=](Stream&) -> Status {
      std::memset(devPtr, value, count);
      return {};
    });
  });
}

aclError aclrtMemcpy2d(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                       size_t height, aclrtMemcpyKind kind) {
  return runtime_call(__func__, [&]() -> Status {
    if (width == 0 || height == 0) return {};
    if (Status status = check_copy_2d(dst, dpitch, src, spitch, width, kind); !status.ok()) {
      return status;
    }
    copy_2d(dst, dpitch, src, spitch, width, height);
    return {};
  });
}

aclError aclrtMemcpy2dAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                            size_t height, aclrtMemcpyKind kind, aclrtStream stream) {
  return runtime_call(__func__, [&]() -> Status {
    if (width == 0 || height == 0) return {};
    if (Status status = check_copy_2d(dst, dpitch, src, spitch, width, kind); !status.ok()) {
      return status;
    }
    return enqueue_copy(stream, must_be_over_on_return(dst, src, kind), [=](Stream&) -> Status {
      copy_2d(dst, dpitch, src, spitch, width, height);
      return {};
    });
  });
}

aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t* free, size_t* total) {
  return runtime_call(__func__, [&]() -> Status {
    if (free == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "free: is null");
    if (total == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "total: is null");
    const int value = static_cast<int>(attr);
    if (value < ACL_DDR_MEM || value > ACL_MEM_P2P_HUGE1G) {
      return failure(ACL_ERROR_INVALID_PARAM, "attr: is ", value, ", must be 0 to 17");
    }
    if (Status status = current_context(nullptr); !status.ok()) return status;
    uint64_t available = 0;
    uint64_t all = 0;
    memory_of_this_process(&available, &all);
    *free = available;
    *total = all;
    return {};
  });
}

}  // extern "C"
