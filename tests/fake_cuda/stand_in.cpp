// Lets torch's CPU tensors stand for a device's: their memory is asked of a CUDAPluggableAllocator's two functions.
// What is freed is overwritten; under the address sanitizer, nothing may touch it until it is given out again.

#include <cstring>
#include <mutex>
#include <unordered_map>

#include <sys/types.h>

#include <c10/core/CPUAllocator.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(pointer, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(pointer, bytes)
#endif

namespace {

void* (*device_malloc)(ssize_t, int, void*);
void (*device_free)(void*, ssize_t, int, void*);

constexpr int kFreed = 0xC5;  // a float of these bytes is -6312.7
std::mutex mutex;
std::unordered_map<void*, size_t> given;

void release(void* pointer) {
  if (pointer == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = given.find(pointer);
    if (found != given.end()) {
      memset(pointer, kFreed, found->second);
      ASAN_POISON_MEMORY_REGION(pointer, found->second);
      given.erase(found);
    }
  }
  device_free(pointer, 0, 0, nullptr);
}

struct StandIn final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = device_malloc(static_cast<ssize_t>(bytes), 0, nullptr);
    if (pointer != nullptr) {
      ASAN_UNPOISON_MEMORY_REGION(pointer, bytes);
      std::lock_guard<std::mutex> guard(mutex);
      given[pointer] = bytes;
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

extern "C" void stand_in(void* malloc_function, void* free_function) {
  device_malloc = reinterpret_cast<decltype(device_malloc)>(malloc_function);
  device_free = reinterpret_cast<decltype(device_free)>(free_function);
  c10::SetCPUAllocator(new StandIn);
}
