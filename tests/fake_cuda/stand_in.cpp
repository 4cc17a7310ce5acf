// Lets torch's CPU tensors stand for a device's: their memory is asked of a CUDAPluggableAllocator's two functions.

#include <sys/types.h>

#include <c10/core/CPUAllocator.h>

namespace {

void* (*device_malloc)(ssize_t, int, void*);
void (*device_free)(void*, ssize_t, int, void*);

void release(void* pointer) {
  device_free(pointer, 0, 0, nullptr);
}

struct StandIn final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = device_malloc(static_cast<ssize_t>(bytes), 0, nullptr);
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
