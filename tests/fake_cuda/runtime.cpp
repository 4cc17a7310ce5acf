// A CUDA runtime over malloc: the functions that the arena calls, counting what a device's pool holds.
// A pool takes memory of the device in chunks, and keeps what is freed until it is trimmed.

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace {

constexpr int kOutOfMemory = 2;
constexpr int64_t kChunk = 2 << 20;
constexpr int kDevices = 2;

struct Pool {
  int64_t used, reserved, most_reserved;
};

struct Given {
  size_t bytes;
  int device;
  void* stream;
};

std::mutex mutex;
Pool pools[kDevices];
std::unordered_map<void*, Given> given;
thread_local int current_device = 0;

int64_t in_chunks(int64_t bytes) {
  return (bytes + kChunk - 1) / kChunk * kChunk;
}

}  // namespace

extern "C" {

int64_t mallocs = 0, frees = 0, misplaced_frees = 0, waits = 0, synchronizations = 0, trims = 0;
int64_t capacity_bytes = INT64_MAX, refusals = 0, last_error = 0;  // to be set by tests: the first two

int cudaMallocAsync(void** pointer, size_t bytes, void* stream) {
  std::lock_guard<std::mutex> guard(mutex);
  Pool& pool = pools[current_device];
  const int64_t reserved = pool.used + static_cast<int64_t>(bytes) > pool.reserved
                               ? in_chunks(pool.used + static_cast<int64_t>(bytes))
                               : pool.reserved;
  if (refusals-- > 0 || reserved > capacity_bytes || posix_memalign(pointer, 512, bytes) != 0) {
    return last_error = kOutOfMemory;
  }
  ++mallocs;
  given[*pointer] = {bytes, current_device, stream};
  pool.used += static_cast<int64_t>(bytes);
  pool.reserved = reserved;
  pool.most_reserved = pool.most_reserved > reserved ? pool.most_reserved : reserved;
  return 0;
}

int cudaFreeAsync(void* pointer, void* stream) {
  std::lock_guard<std::mutex> guard(mutex);
  const Given block = given.at(pointer);
  ++frees;
  misplaced_frees += block.device != current_device || block.stream != stream;
  pools[block.device].used -= static_cast<int64_t>(block.bytes);
  given.erase(pointer);
  free(pointer);
  return 0;
}

int cudaGetLastError() {
  const int error = static_cast<int>(last_error);
  last_error = 0;
  return error;
}

int cudaSetDevice(int device) {
  current_device = device;
  return 0;
}

int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = malloc(1);
  return 0;
}

int cudaEventRecord(void*, void*) {
  return 0;
}

int cudaEventDestroy(void* event) {
  free(event);
  return 0;
}

int cudaStreamWaitEvent(void*, void*, unsigned) {
  ++waits;
  return 0;
}

int cudaDeviceSynchronize() {
  ++synchronizations;
  return 0;
}

int cudaDeviceGetDefaultMemPool(void** pool, int device) {
  *pool = &pools[device];
  return 0;
}

int cudaMemPoolTrimTo(void* pool, size_t) {
  std::lock_guard<std::mutex> guard(mutex);
  ++trims;
  static_cast<Pool*>(pool)->reserved = in_chunks(static_cast<Pool*>(pool)->used);
  return 0;
}

int cudaMemPoolSetAttribute(void* pool, int name, void* value) {
  std::lock_guard<std::mutex> guard(mutex);
  if (name == 6) {  // cudaMemPoolAttrReservedMemHigh
    static_cast<Pool*>(pool)->most_reserved = static_cast<int64_t>(*static_cast<uint64_t*>(value));
  }
  return 0;
}

int cudaMemPoolGetAttribute(void* pool, int name, void* value) {
  std::lock_guard<std::mutex> guard(mutex);
  const Pool& of = *static_cast<Pool*>(pool);
  *static_cast<uint64_t*>(value) = static_cast<uint64_t>(name == 5 ? of.reserved : name == 6 ? of.most_reserved : 0);
  return 0;
}

}  // extern "C"
