// A libc10_cuda over malloc, for a torch without CUDA: an allocator that torch's headers declare, and what else the arena
// calls of c10 and of the runtime. It counts what a device's pool holds: memory is taken of the device in chunks, and what
// is freed is kept until the cache is emptied.

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

using c10::DeviceIndex;

extern "C" {
int64_t mallocs = 0, frees = 0, misplaced_frees = 0, waits = 0, trims = 0, records = 0;
int64_t capacity_bytes = INT64_MAX, chunk_bytes = 2 << 20, refusals = 0;  // to be set by tests
int64_t waiting = 0, waited_for = 0;  // the streams of the last wait
int64_t contexts = 0;  // a bit for each device that was made the current one for good
}

namespace {


constexpr int64_t kAlignment = 512;
constexpr int kDevices = 2;

struct Pool {
  int64_t live = 0, most_live = 0, reserved = 0, most_reserved = 0;
};

struct Given {
  int64_t bytes;
  DeviceIndex device;
  cudaStream_t stream;
};

std::mutex mutex;
Pool pools[kDevices];
std::unordered_map<void*, Given> given;
thread_local DeviceIndex the_device = 0;
thread_local int64_t the_stream = 0;

int64_t in_chunks(int64_t bytes) {
  return (bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes;
}

void* take(size_t requested, cudaStream_t stream) {
  const int64_t bytes = (static_cast<int64_t>(requested) + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard<std::mutex> guard(mutex);
  Pool& pool = pools[the_device];
  int64_t reserved = std::max(pool.reserved, in_chunks(pool.live + bytes));
  if (reserved > capacity_bytes) {
    reserved = in_chunks(pool.live + bytes);  // what is held unused goes back first
  }
  void* pointer = nullptr;
  if (refusals-- > 0 || reserved > capacity_bytes || posix_memalign(&pointer, kAlignment, bytes) != 0) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
  }
  ++mallocs;
  given[pointer] = {bytes, the_device, stream};
  pool.live += bytes;
  pool.most_live = std::max(pool.most_live, pool.live);
  pool.reserved = reserved;
  pool.most_reserved = std::max(pool.most_reserved, reserved);
  return pointer;
}

void give(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = given.find(pointer);
  if (found == given.end()) {
    ++misplaced_frees;
    return;
  }
  ++frees;
  pools[found->second.device].live -= found->second.bytes;
  given.erase(found);
  free(pointer);
}

}  // namespace

namespace c10::cuda::CUDACachingAllocator {

struct Refusing : CUDAAllocator {
  CUDAAllocator* below() const {
    throw std::runtime_error("the stand-in of torch's allocator does not do that");
  }
#include "forwarding.inc"
};

struct StandIn final : Refusing {
  DataPtr allocate(size_t bytes) override {
    void* pointer = bytes == 0 ? nullptr : take(bytes, getCurrentCUDAStream().stream());
    return {pointer, pointer, &give, Device(DeviceType::CUDA, the_device)};
  }
  void* raw_alloc(size_t bytes) override {
    return take(bytes, getCurrentCUDAStream().stream());
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return take(bytes, stream);
  }
  void raw_delete(void* pointer) override {
    give(pointer);
  }
  DeleterFnPtr raw_deleter() const override {
    return &give;
  }
  // As torch's own: of what is not its own it knows nothing, and says nothing.
  void recordStream(const DataPtr& memory, CUDAStream) override {
    records += memory.get_deleter() == &give;
  }
  void emptyCache(MempoolId_t) override {
    std::lock_guard<std::mutex> guard(mutex);
    ++trims;
    for (Pool& pool : pools) {
      pool.reserved = in_chunks(pool.live);
    }
  }
  void* getBaseAllocation(void* pointer, size_t* bytes) override {
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = given.find(pointer);
    *bytes = found == given.end() ? 0 : static_cast<size_t>(found->second.bytes);
    return pointer;
  }
  std::string name() override {
    return "stand-in";
  }
};

StandIn stand_in;
std::atomic<CUDAAllocator*> allocator{&stand_in};

}  // namespace c10::cuda::CUDACachingAllocator

namespace c10::cuda {

cudaError_t GetDevice(DeviceIndex* device) {
  *device = the_device;
  return cudaSuccess;
}

cudaError_t SetDevice(DeviceIndex device, const bool) {
  the_device = device;
  contexts |= 1 << device;
  return cudaSuccess;
}

cudaError_t MaybeSetDevice(DeviceIndex device) {
  the_device = device;
  return cudaSuccess;
}

void c10_cuda_check_implementation(const int32_t, const char*, const char*, const uint32_t, const bool) {}

cudaStream_t CUDAStream::stream() const {
  return reinterpret_cast<cudaStream_t>(id());
}

CUDAStream getCurrentCUDAStream(DeviceIndex device) {
  const Device on(DeviceType::CUDA, device < 0 ? the_device : device);
  return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::UNSAFE, on, the_stream));
}

}  // namespace c10::cuda

extern "C" {

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = *total = 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(malloc(sizeof(cudaStream_t)));
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *reinterpret_cast<cudaStream_t*>(event) = stream;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ++waits;
  waiting = reinterpret_cast<int64_t>(stream);
  waited_for = reinterpret_cast<int64_t>(*reinterpret_cast<cudaStream_t*>(event));
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}

// For tests.

void fake_current(int device, int64_t stream) {
  the_device = static_cast<DeviceIndex>(device);
  the_stream = stream;
}

int64_t fake_stream() {
  return the_stream;
}

// A request to the allocator in front, and what a tensor does with it; `deleter` has to be kept for the free.
void* fake_malloc(int64_t bytes, void** deleter) {
  auto memory = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(bytes));
  *deleter = reinterpret_cast<void*>(memory.get_deleter());
  return memory.release_context();
}

void fake_free(void* pointer, void* deleter) {
  reinterpret_cast<c10::DeleterFnPtr>(deleter)(pointer);
}

void fake_record_stream(void* pointer, void* deleter, int64_t stream) {
  using c10::cuda::CUDAStream;
  const c10::Device device(c10::DeviceType::CUDA, the_device);
  c10::DataPtr memory(pointer, pointer, reinterpret_cast<c10::DeleterFnPtr>(deleter), device);
  const c10::Stream on(c10::Stream::UNSAFE, memory.device(), stream);
  c10::cuda::CUDACachingAllocator::get()->recordStream(memory, CUDAStream(CUDAStream::UNCHECKED, on));
  memory.release_context();
}

void* fake_base(void* pointer, int64_t* bytes) {
  size_t size = 0;
  void* base = c10::cuda::CUDACachingAllocator::get()->getBaseAllocation(pointer, &size);
  *bytes = static_cast<int64_t>(size);
  return base;
}

void* fake_raw_alloc(int64_t bytes) {
  return c10::cuda::CUDACachingAllocator::raw_alloc(static_cast<size_t>(bytes));
}

void fake_raw_delete(void* pointer) {
  c10::cuda::CUDACachingAllocator::raw_delete(pointer);
}

void fake_empty_cache() {
  c10::cuda::CUDACachingAllocator::emptyCache();
}

// Puts another allocator in front, as a tool for memory may: here torch's own once more, by another name.
void fake_cover() {
  c10::cuda::CUDACachingAllocator::allocator = &c10::cuda::CUDACachingAllocator::stand_in;
}

void fake_usage(int device, int64_t* usage) {
  std::lock_guard<std::mutex> guard(mutex);
  const Pool& pool = pools[device];
  usage[0] = pool.live;
  usage[1] = pool.most_live;
  usage[2] = pool.reserved;
  usage[3] = pool.most_reserved;
}

void fake_reset_peaks(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  pools[device].most_live = pools[device].live;
  pools[device].most_reserved = pools[device].reserved;
}

}  // extern "C"
