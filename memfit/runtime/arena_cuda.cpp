// The arena on CUDA: the functions of a torch.cuda.memory.CUDAPluggableAllocator. Requests on the stream of the running
// step, from whatever thread (autograd's backward runs in one of its own), are asked of arena_core.cpp; all others get
// memory from the driver's stream-ordered pool, which keeps what is freed.
//
// The CUDA runtime is found in the process at run time, where torch has loaded it: building this file needs neither its
// headers nor its library.

#include "arena_calls.cpp"

#include <dlfcn.h>
#include <sys/types.h>

#include <limits>
#include <stdexcept>
#include <string>

namespace {

using Stream = void*;  // cudaStream_t
using Event = void*;   // cudaEvent_t

// Values of cuda_runtime_api.h.
constexpr int kSuccess = 0;
constexpr unsigned kDisableTiming = 2;         // cudaEventDisableTiming
constexpr int kAttributeReleaseThreshold = 4;  // cudaMemPoolAttrReleaseThreshold

struct Runtime {
  int (*malloc_async)(void**, size_t, Stream);
  int (*free_async)(void*, Stream);
  int (*set_device)(int);
  int (*get_device)(int*);
  int (*event_create)(Event*, unsigned);
  int (*event_record)(Event, Stream);
  int (*event_destroy)(Event);
  int (*stream_wait)(Stream, Event, unsigned);
  int (*synchronize)();
  int (*default_pool)(void**, int);
  int (*set_attribute)(void*, int, void*);
  int (*last_error)();
  bool complete = true;

  Runtime() {
    find(&malloc_async, "cudaMallocAsync");
    find(&free_async, "cudaFreeAsync");
    find(&set_device, "cudaSetDevice");
    find(&get_device, "cudaGetDevice");
    find(&event_create, "cudaEventCreateWithFlags");
    find(&event_record, "cudaEventRecord");
    find(&event_destroy, "cudaEventDestroy");
    find(&stream_wait, "cudaStreamWaitEvent");
    find(&synchronize, "cudaDeviceSynchronize");
    find(&default_pool, "cudaDeviceGetDefaultMemPool");
    find(&set_attribute, "cudaMemPoolSetAttribute");
    find(&last_error, "cudaGetLastError");
  }

 private:
  template <typename Function>
  void find(Function* function, const char* name) {
    *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    complete = complete && *function != nullptr;
  }
};

Runtime& runtime() {
  static auto* the_runtime = new Runtime;
  return *the_runtime;
}

struct OnDevice {
  int before = 0;
  bool changed = false;

  explicit OnDevice(int device) {
    runtime().get_device(&before);
    changed = before != device && runtime().set_device(device) == kSuccess;
  }
  ~OnDevice() {
    if (changed) {
      runtime().set_device(before);
    }
  }
};

// Other streams that use a block, by the record_stream of its tensor: its memory may be used again after they are done.
struct Users {
  std::mutex mutex;
  std::unordered_map<void*, std::vector<Stream>> of;
};

Users& users() {
  static auto* the_users = new Users;
  return *the_users;
}

std::vector<Stream> take_users(void* pointer) {
  std::lock_guard<std::mutex> guard(users().mutex);
  const auto found = users().of.find(pointer);
  if (found == users().of.end()) {
    return {};
  }
  std::vector<Stream> streams = std::move(found->second);
  users().of.erase(found);
  return streams;
}

// Lets the stream that a block belongs to wait for what its other users have been given so far. What comes after on that
// stream may have the memory: reuse is ordered by the stream, and nobody waits on the host.
void wait_for_users(void* pointer, Stream stream) {
  for (Stream user : take_users(pointer)) {
    Event done = nullptr;
    if (user != stream && runtime().event_create(&done, kDisableTiming) == kSuccess) {
      runtime().event_record(done, user);
      runtime().stream_wait(stream, done, 0);
      runtime().event_destroy(done);
    }
  }
}

uintptr_t origin_of(int device, Stream stream) {
  // the default stream is null, and 0 means that no step runs; streams are aligned, so the low bits are free
  return (reinterpret_cast<uintptr_t>(stream) << 8) + static_cast<uintptr_t>(device) + 1;
}

thread_local Stream slab_stream = nullptr;

// Null where there is no memory. The runtime keeps an error until it is asked for, and torch asks after its next kernel:
// that one would be blamed.
void* memory_or_null(size_t bytes, Stream stream) {
  void* pointer = nullptr;
  if (runtime().malloc_async(&pointer, bytes, stream) == kSuccess) {
    return pointer;
  }
  runtime().last_error();
  return nullptr;
}

// torch takes what it is given for memory, so that to give nothing would crash.
void* ordinary(size_t bytes, Stream stream) {
  void* pointer = memory_or_null(bytes, stream);
  if (pointer == nullptr) {
    throw std::runtime_error("CUDA out of memory: " + std::to_string(bytes) + " bytes, asked of cudaMallocAsync");
  }
  return pointer;
}

}  // namespace

namespace memfit {

void* slab_memory(int64_t bytes, void** owner) {
  *owner = slab_stream;
  runtime().synchronize();  // steps on any stream may use it from now on
  void* pointer = memory_or_null(static_cast<size_t>(bytes), slab_stream);
  runtime().synchronize();
  return pointer;
}

void free_slab_memory(void* pointer, void* owner) {
  runtime().synchronize();  // blocks in it may be in use on other streams; this happens only when the arena moves
  runtime().free_async(pointer, owner);
}

void discard(char*, char*) {}  // pages of the device cannot be given back in parts

}  // namespace memfit

extern "C" {

// 0: fine; 1: no CUDA runtime with a stream-ordered allocator is loaded.
int memfit_arena_cuda_prepare(int device) {
  if (!runtime().complete) {
    return 1;
  }
  void* pool = nullptr;
  uint64_t keep_all = std::numeric_limits<uint64_t>::max();
  if (runtime().default_pool(&pool, device) != kSuccess) {
    return 1;
  }
  return runtime().set_attribute(pool, kAttributeReleaseThreshold, &keep_all) == kSuccess ? 0 : 1;
}

void* memfit_arena_cuda_malloc(ssize_t bytes, int device, Stream stream) {
  if (bytes <= 0) {
    return nullptr;
  }
  OnDevice on(device);
  const uintptr_t served = memfit::state().origin.load(std::memory_order_relaxed);
  if (served != origin_of(device, stream)) {
    if (served != 0) {
      memfit::state().other_threads.fetch_add(1, std::memory_order_relaxed);
    }
    return ordinary(static_cast<size_t>(bytes), stream);
  }
  void* pointer = nullptr;
  int64_t number = 0;
  switch (memfit::request(bytes, &pointer, &number)) {
    case memfit::Verdict::kServed:
      return pointer;
    case memfit::Verdict::kTracked:
      pointer = ordinary(static_cast<size_t>(bytes), stream);
      memfit::track(pointer, bytes, number, nullptr);
      return pointer;
    case memfit::Verdict::kOrdinary:
      break;
  }
  return ordinary(static_cast<size_t>(bytes), stream);
}

void memfit_arena_cuda_free(void* pointer, ssize_t, int device, Stream stream) {
  if (pointer == nullptr) {
    return;
  }
  OnDevice on(device);
  wait_for_users(pointer, stream);
  void* owner = nullptr;
  if (!memfit::release(pointer, &owner)) {
    runtime().free_async(pointer, stream);
  }
}

void memfit_arena_cuda_record_stream(void* pointer, Stream stream) {
  std::lock_guard<std::mutex> guard(users().mutex);
  auto& streams = users().of[pointer];
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

// As memfit_arena_begin_step, for a stream of a device.
int memfit_arena_cuda_begin_step(void* handle, int64_t plan_id, int device, Stream stream) {
  return memfit_arena_begin_step(handle, plan_id, origin_of(device, stream));
}

int64_t memfit_arena_cuda_end_step(void* handle, int64_t* counts) {
  return memfit_arena_end_step(handle, counts);
}

// The stream that slabs of the calling thread's arenas are allocated on.
void memfit_arena_cuda_on_stream(Stream stream) {
  slab_stream = stream;
}

}  // extern "C"
