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
constexpr int kReleaseThreshold = 4;  // cudaMemPoolAttrReleaseThreshold
constexpr int kReservedNow = 5;       // cudaMemPoolAttrReservedMemCurrent
constexpr int kReservedHigh = 6;      // cudaMemPoolAttrReservedMemHigh

constexpr int64_t kAlignment = 512;  // of cudaMallocAsync, and of torch's caching allocator

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
  int (*get_attribute)(void*, int, void*);
  int (*trim)(void*, size_t);
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
    find(&get_attribute, "cudaMemPoolGetAttribute");
    find(&trim, "cudaMemPoolTrimTo");
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

struct Place {
  int device;
  Stream stream;
};

struct Block {
  int64_t bytes;
  Place place;
};

struct Device {
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
};

// What the driver has given: ordinary blocks and slabs. It is freed where it was allocated: torch keeps the size and the
// stream of a pointer as well, but not those of the last allocation at that address.
struct Books {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  std::unordered_map<int, Device> devices;
};

Books& books() {
  static auto* the_books = new Books;
  return *the_books;
}

void* pool_of(int device) {
  void* pool = nullptr;
  return runtime().default_pool(&pool, device) == kSuccess ? pool : nullptr;
}

// The driver keeps what is freed, as torch's caching allocator does; by default it gives all back at every wait.
bool keep_freed(int device) {
  uint64_t all = std::numeric_limits<uint64_t>::max();
  return runtime().set_attribute(pool_of(device), kReleaseThreshold, &all) == kSuccess;
}

// The counters of a device, with the books' mutex held.
Device& counted(int device) {
  const auto [found, is_new] = books().devices.try_emplace(device);
  if (is_new) {
    keep_freed(device);
  }
  return found->second;
}

void give_back_unused(int device) {
  OnDevice on(device);
  runtime().synchronize();
  runtime().trim(pool_of(device), 0);
}

int64_t attribute(int device, int name) {
  uint64_t value = 0;
  runtime().get_attribute(pool_of(device), name, &value);
  return static_cast<int64_t>(value);
}

// Null where there is no memory. The runtime keeps an error until it is asked for, and torch asks after its next kernel:
// that one would be blamed.
void* asked_of_driver(int64_t bytes, Stream stream) {
  void* pointer = nullptr;
  if (runtime().malloc_async(&pointer, static_cast<size_t>(bytes), stream) == kSuccess) {
    return pointer;
  }
  runtime().last_error();
  return nullptr;
}

// Null where there is no memory, even after what nobody uses was given back.
void* memory_or_null(int64_t requested_bytes, Place place) {
  OnDevice on(place.device);
  const int64_t bytes = (requested_bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* pointer = asked_of_driver(bytes, place.stream);
  if (pointer == nullptr) {
    give_back_unused(place.device);
    pointer = asked_of_driver(bytes, place.stream);
  }
  if (pointer == nullptr) {
    return nullptr;
  }
  std::lock_guard<std::mutex> guard(books().mutex);
  Device& device = counted(place.device);
  device.live_bytes += bytes;
  device.peak_bytes = std::max(device.peak_bytes, device.live_bytes);
  books().blocks[pointer] = {bytes, place};
  return pointer;
}

// torch takes what it is given for memory, so that to give nothing would crash.
void* ordinary(int64_t bytes, Place place) {
  void* pointer = memory_or_null(bytes, place);
  if (pointer == nullptr) {
    throw std::runtime_error("CUDA out of memory: " + std::to_string(bytes) + " bytes, asked of cudaMallocAsync");
  }
  return pointer;
}

// Where a block was allocated; what torch says of it, if the driver did not give it.
Place home_of(void* pointer, Place said) {
  std::lock_guard<std::mutex> guard(books().mutex);
  const auto found = books().blocks.find(pointer);
  return found == books().blocks.end() ? said : found->second.place;
}

// Frees what memory_or_null gave.
void give_to_driver(void* pointer, bool after_all_streams) {
  Block block{};
  {
    std::lock_guard<std::mutex> guard(books().mutex);
    const auto found = books().blocks.find(pointer);
    if (found == books().blocks.end()) {
      return;
    }
    block = found->second;
    books().blocks.erase(found);
    counted(block.place.device).live_bytes -= block.bytes;
  }
  OnDevice on(block.place.device);
  if (after_all_streams) {
    runtime().synchronize();
  }
  runtime().free_async(pointer, block.place.stream);
}

thread_local Place slab_place{0, nullptr};

}  // namespace

namespace memfit {

void* slab_memory(int64_t bytes, void** owner) {
  *owner = nullptr;
  const Place place = slab_place;
  give_back_unused(place.device);  // what the recorded step left is in pieces, and both would be held
  void* pointer = memory_or_null(bytes, place);
  OnDevice on(place.device);
  runtime().synchronize();  // steps on any stream may use it from now on
  return pointer;
}

void free_slab_memory(void* pointer, void*) {
  // blocks in it may be in use on other streams; this happens only when the arena moves
  give_to_driver(pointer, true);
}

void discard(char*, char*) {}  // pages of the device cannot be given back in parts

}  // namespace memfit

extern "C" {

// 0: fine; 1: no CUDA runtime with a stream-ordered allocator is loaded.
int memfit_arena_cuda_prepare(int device) {
  return runtime().complete && keep_freed(device) ? 0 : 1;
}

void* memfit_arena_cuda_malloc(ssize_t bytes, int device, Stream stream) {
  if (bytes <= 0) {
    return nullptr;
  }
  const Place place{device, stream};
  const uintptr_t served = memfit::state().origin.load(std::memory_order_relaxed);
  if (served != origin_of(device, stream)) {
    if (served != 0) {
      memfit::state().other_threads.fetch_add(1, std::memory_order_relaxed);
    }
    return ordinary(bytes, place);
  }
  void* pointer = nullptr;
  int64_t number = 0;
  switch (memfit::request(bytes, &pointer, &number)) {
    case memfit::Verdict::kServed:
      return pointer;
    case memfit::Verdict::kTracked:
      pointer = ordinary(bytes, place);
      memfit::track(pointer, bytes, number, nullptr);
      return pointer;
    case memfit::Verdict::kOrdinary:
      break;
  }
  return ordinary(bytes, place);
}

// What torch says of the bytes is not looked at: see Books.
void memfit_arena_cuda_free(void* pointer, ssize_t, int device, Stream stream) {
  if (pointer == nullptr) {
    return;
  }
  const Place home = home_of(pointer, {device, stream});
  {
    OnDevice on(home.device);
    wait_for_users(pointer, home.stream);
  }
  void* owner = nullptr;
  if (!memfit::release(pointer, &owner)) {
    give_to_driver(pointer, false);
  }
}

// Bytes of a device: live and the most since the reset, of ordinary blocks and slabs; what the driver's pool holds for
// them, and the most that it held.
void memfit_arena_cuda_usage(int device, int64_t* usage) {
  const int64_t reserved = attribute(device, kReservedNow);
  std::lock_guard<std::mutex> guard(books().mutex);
  const Device& now = counted(device);
  usage[0] = now.live_bytes;
  usage[1] = now.peak_bytes;
  usage[2] = reserved;
  usage[3] = std::max(reserved, attribute(device, kReservedHigh));
}

// Begins to look for the most anew.
void memfit_arena_cuda_reset_peaks(int device) {
  uint64_t none = 0;
  runtime().set_attribute(pool_of(device), kReservedHigh, &none);
  std::lock_guard<std::mutex> guard(books().mutex);
  Device& now = counted(device);
  now.peak_bytes = now.live_bytes;
}

// torch.cuda.empty_cache.
void memfit_arena_cuda_empty_cache() {
  std::vector<int> devices;
  {
    std::lock_guard<std::mutex> guard(books().mutex);
    for (const auto& [device, now] : books().devices) {
      devices.push_back(device);
    }
  }
  for (const int device : devices) {
    give_back_unused(device);
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

// Where slabs of the calling thread's arenas are allocated.
void memfit_arena_cuda_place_slabs(int device, Stream stream) {
  slab_place = {device, stream};
}

}  // extern "C"
