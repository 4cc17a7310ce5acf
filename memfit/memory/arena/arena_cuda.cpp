// The arena on CUDA: an allocator that stands in front of torch's own while a step runs, and forwards to it.
//
// torch asks the allocator that `c10::cuda::CUDACachingAllocator::allocator` points to. Requests on the stream of the
// running step are asked of arena_core.cpp; all others, and all other calls, go to the allocator that was in place.
// The slab is one block of that allocator, so that its statistics and its caps hold, and what the layout does not know
// is its memory too.
//
// A block that the arena answers for has a deleter of its own, whoever stands in front when it is freed. As long as such
// a block lives, this allocator stays in front: the one below would not heed `record_stream` of a block that it does not
// know. In memfit's cache the file is built against the headers of the torch that runs it; forwarding.inc is written from
// them (forwarding.py).

#include "arena_calls.cpp"

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace c10::cuda::CUDACachingAllocator {

struct Forwarding : CUDAAllocator {
  std::atomic<CUDAAllocator*> in_place{nullptr};  // never null once a step has begun

  CUDAAllocator* below() const {
    return in_place.load();
  }

#include "forwarding.inc"
};

}  // namespace c10::cuda::CUDACachingAllocator

namespace {

using c10::cuda::CUDAStream;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;

struct Place {
  c10::DeviceIndex device;
  cudaStream_t stream;
};

thread_local Place slab_place{0, nullptr};

// What a slab was made of, and the stream whose order its reuse follows: that of the last step.
struct Home {
  CUDAAllocator* allocator;
  Place place;
  std::atomic<cudaStream_t> stream;
};

struct OnDevice {
  c10::DeviceIndex before = 0;
  bool changed = false;

  explicit OnDevice(c10::DeviceIndex device) {
    changed = c10::cuda::GetDevice(&before) == cudaSuccess && before != device &&
              c10::cuda::SetDevice(device) == cudaSuccess;
  }
  ~OnDevice() {
    if (changed) {
      (void)c10::cuda::MaybeSetDevice(before);  // makes no context where there is none
    }
  }
};

uintptr_t origin_of(Place place) {
  // the default stream is null, and 0 means that no step runs; streams are aligned, so the low bits are free
  return (reinterpret_cast<uintptr_t>(place.stream) << 8) + static_cast<uintptr_t>(place.device) + 1;
}

uintptr_t this_thread() {
  return reinterpret_cast<uintptr_t>(reinterpret_cast<void*>(pthread_self()));
}

// Lets a stream of the current device wait for what another has been given so far; the host waits only where that fails.
void wait_for(cudaStream_t waiting, cudaStream_t other) {
  cudaEvent_t done = nullptr;
  const bool waits = cudaEventCreateWithFlags(&done, cudaEventDisableTiming) == cudaSuccess &&
                     cudaEventRecord(done, other) == cudaSuccess &&
                     cudaStreamWaitEvent(waiting, done, 0) == cudaSuccess;
  if (done != nullptr) {
    (void)cudaEventDestroy(done);
  }
  if (!waits) {
    (void)cudaDeviceSynchronize();
  }
}

// Other streams that use a block of a slab: by the record_stream of its tensor, or because it was requested on them.
struct Users {
  std::atomic<size_t> blocks{0};
  std::mutex mutex;
  std::unordered_map<void*, std::vector<cudaStream_t>> of;

  void add(void* pointer, cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(mutex);
    auto& streams = of[pointer];
    blocks = of.size();
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }
};

Users& users() {
  static auto* the_users = new Users;
  return *the_users;
}

// Lets the slab's stream wait for what the other users of a block have been given so far. What comes after on that stream
// may have the memory: reuse is ordered by the stream, and nobody waits on the host.
void wait_for_users(void* pointer, const Home& home) {
  std::vector<cudaStream_t> streams;
  {
    std::lock_guard<std::mutex> guard(users().mutex);
    const auto found = users().of.find(pointer);
    if (found == users().of.end()) {
      return;
    }
    streams = std::move(found->second);
    users().of.erase(found);
    users().blocks = users().of.size();
  }
  OnDevice on(home.place.device);
  for (cudaStream_t user : streams) {
    wait_for(home.stream, user);
  }
}

// Lets a step run on another stream than the last one, after all that the slab's memory was used for. Tensors that still
// lie there are the other stream's, which may be given more that reads them before they are freed.
void move_to(memfit::Slab* slab, cudaStream_t stream) {
  auto* home = static_cast<Home*>(slab->owner);
  const cudaStream_t before = home->stream;
  if (before == stream) {
    return;
  }
  std::vector<void*> left_behind;
  {
    memfit::State& now = memfit::state();
    std::lock_guard<std::mutex> guard(now.mutex);
    now.table.each([&left_behind, slab](const memfit::Entry& entry) {
      if (entry.slab == slab) {
        left_behind.push_back(entry.pointer);
      }
    });
  }
  for (void* pointer : left_behind) {
    users().add(pointer, before);
  }
  home->stream = stream;
  OnDevice on(home->place.device);
  wait_for(stream, before);  // last: what another thread frees meanwhile was used before it
}

bool find(void* pointer, memfit::Entry* entry) {
  memfit::State& now = memfit::state();
  std::lock_guard<std::mutex> guard(now.mutex);
  const memfit::Entry* there = now.table.find(pointer);
  if (there != nullptr) {
    *entry = *there;
  }
  return there != nullptr;
}

void release_or_free(void* pointer);

struct ArenaAllocator final : c10::cuda::CUDACachingAllocator::Forwarding {
  c10::DataPtr allocate(size_t bytes) override {
    int64_t number = 0;
    c10::DeviceIndex device = 0;
    void* pointer = nullptr;
    const memfit::Verdict verdict = asked(bytes, &pointer, &number, &device);
    if (verdict == memfit::Verdict::kServed) {
      return {pointer, pointer, &release_or_free, c10::Device(c10::DeviceType::CUDA, device)};
    }
    c10::DataPtr memory = below()->allocate(bytes);
    pointer = memory.get();
    if (verdict == memfit::Verdict::kOrdinary || pointer == nullptr || pointer != memory.get_context()) {
      return memory;
    }
    const c10::DeleterFnPtr deleter = memory.get_deleter();
    const c10::Device at = memory.device();
    memory.release_context();
    memfit::track(pointer, static_cast<int64_t>(bytes), number, reinterpret_cast<void*>(deleter));
    return {pointer, pointer, &release_or_free, at};
  }

  // Libraries take workspaces so, for the length of a call.
  void* raw_alloc(size_t bytes) override {
    int64_t number = 0;
    c10::DeviceIndex device = 0;
    void* pointer = nullptr;
    const memfit::Verdict verdict = asked(bytes, &pointer, &number, &device);
    return verdict == memfit::Verdict::kServed ? pointer : kept(below()->raw_alloc(bytes), bytes, number, verdict);
  }

  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    int64_t number = 0;
    c10::DeviceIndex device = 0;
    void* pointer = nullptr;
    (void)c10::cuda::GetDevice(&device);
    const memfit::Verdict verdict = asked_at(bytes, {device, stream}, &pointer, &number);
    return verdict == memfit::Verdict::kServed
               ? pointer
               : kept(below()->raw_alloc_with_stream(bytes, stream), bytes, number, verdict);
  }

  void raw_delete(void* pointer) override {
    release_or_free(pointer);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release_or_free;
  }

  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    recordStream(memory, CUDAStream(stream));
  }

  void recordStream(const c10::DataPtr& memory, CUDAStream stream) override {
    memfit::Entry entry;
    if (memory.get_deleter() != &release_or_free || !find(memory.get_context(), &entry)) {
      below()->recordStream(memory, stream);
    } else if (entry.slab == nullptr) {
      c10::DataPtr as_below(
          entry.pointer, entry.pointer, reinterpret_cast<c10::DeleterFnPtr>(entry.owner), memory.device());
      below()->recordStream(as_below, stream);
      as_below.release_context();
    } else if (static_cast<Home*>(entry.slab->owner)->stream != stream.stream()) {
      users().add(entry.pointer, stream.stream());
    }
  }

  void* getBaseAllocation(void* pointer, size_t* bytes) override {
    return below()->getBaseAllocation(base_of(pointer), bytes);
  }

  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* pointer) override {
    void* base = base_of(pointer);
    auto handle = below()->shareIpcHandle(base);
    handle.offset += static_cast<char*>(pointer) - static_cast<char*>(base);
    return handle;
  }

 private:
  memfit::Verdict asked(size_t bytes, void** pointer, int64_t* number, c10::DeviceIndex* device) {
    if (memfit::state().origin.load(std::memory_order_relaxed) == 0) {
      return memfit::Verdict::kOrdinary;
    }
    const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    *device = stream.device_index();
    return asked_at(bytes, {*device, stream.stream()}, pointer, number);
  }

  static memfit::Verdict asked_at(size_t bytes, Place place, void** pointer, int64_t* number) {
    const uintptr_t served = memfit::state().origin.load(std::memory_order_relaxed);
    if (served == 0 || bytes == 0) {
      return memfit::Verdict::kOrdinary;
    }
    const uintptr_t thread = memfit::state().thread.load(std::memory_order_relaxed);
    if (served != origin_of(place) || (thread != 0 && thread != this_thread())) {
      memfit::state().other_threads.fetch_add(1, std::memory_order_relaxed);
      return memfit::Verdict::kOrdinary;
    }
    return memfit::request(static_cast<int64_t>(bytes), pointer, number);
  }

  void* kept(void* pointer, size_t bytes, int64_t number, memfit::Verdict verdict) {
    if (verdict == memfit::Verdict::kTracked && pointer != nullptr) {
      memfit::track(pointer, static_cast<int64_t>(bytes), number, reinterpret_cast<void*>(below()->raw_deleter()));
    }
    return pointer;
  }

  // The slab that a block lies in, whose base the allocator below knows.
  static void* base_of(void* pointer) {
    memfit::Entry entry;
    return find(pointer, &entry) && entry.slab != nullptr ? entry.slab->base : pointer;
  }
};

// Never destroyed: storages remember the allocator that they may have to grow with.
ArenaAllocator& allocator() {
  static auto* the_allocator = new ArenaAllocator;
  return *the_allocator;
}

bool in_front = false;  // guarded by the state's mutex

// Puts back the allocator that was in place, once no step runs and no block needs this one. It stays if another allocator
// was put in front of it meanwhile.
void step_aside() {
  memfit::State& now = memfit::state();
  std::lock_guard<std::mutex> guard(now.mutex);
  CUDAAllocator* mine = &allocator();
  if (in_front && now.running == nullptr && now.table.empty()) {
    in_front = !c10::cuda::CUDACachingAllocator::allocator.compare_exchange_strong(mine, allocator().below());
  }
}

void release_or_free(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  memfit::Entry entry;
  if (users().blocks.load() != 0 && find(pointer, &entry) && entry.slab != nullptr) {
    wait_for_users(pointer, *static_cast<Home*>(entry.slab->owner));
  }
  void* owner = nullptr;
  if (!memfit::release(pointer, &owner)) {
    (owner == nullptr ? allocator().below()->raw_deleter() : reinterpret_cast<c10::DeleterFnPtr>(owner))(pointer);
  }
  if (memfit::state().origin.load(std::memory_order_relaxed) == 0) {
    step_aside();
  }
}

}  // namespace

namespace memfit {

// One block of the allocator in place. What it holds unused goes back first: it is in pieces, and would be held as well.
void* slab_memory(int64_t bytes, void** owner) {
  CUDAAllocator* from = c10::cuda::CUDACachingAllocator::get();
  from = from == &allocator() ? allocator().below() : from;
  const Place place = slab_place;
  OnDevice on(place.device);
  try {
    from->emptyCache();
    void* base = from->raw_alloc_with_stream(static_cast<size_t>(bytes), place.stream);
    *owner = new Home{from, place, place.stream};
    return base;
  } catch (const c10::OutOfMemoryError&) {
    return nullptr;
  }
}

// Later requests on the stream that the slab was taken on may get its memory, in the order of that stream.
void free_slab_memory(void* pointer, void* owner) {
  auto* home = static_cast<Home*>(owner);
  OnDevice on(home->place.device);
  if (home->stream != home->place.stream) {
    wait_for(home->place.stream, home->stream);
  }
  home->allocator->raw_delete(pointer);
  delete home;
}

void discard(char*, char*) {}  // pages of the device cannot be given back in parts

}  // namespace memfit

extern "C" {

// As memfit_arena_begin_step, for a stream of a device, and for all threads or the calling one alone. 5: an allocator was
// put in front of this one, which cannot be in two places.
int memfit_arena_cuda_begin_step(void* handle, int64_t plan_id, int device, void* stream, int this_thread_alone) {
  {
    std::lock_guard<std::mutex> guard(memfit::state().mutex);
    CUDAAllocator* current = c10::cuda::CUDACachingAllocator::get();
    if (in_front && current != &allocator()) {
      return 5;
    }
    if (!in_front) {
      allocator().in_place = current;
    }
  }
  const Place place{static_cast<c10::DeviceIndex>(device), static_cast<cudaStream_t>(stream)};
  if (memfit::Slab* slab = static_cast<memfit::Arena*>(handle)->slab; slab != nullptr) {
    move_to(slab, place.stream);
  }
  const int failure = memfit_arena_begin_step(handle, plan_id, origin_of(place));
  if (failure == 0) {
    std::lock_guard<std::mutex> guard(memfit::state().mutex);
    memfit::state().thread = this_thread_alone != 0 ? this_thread() : 0;
    in_front = true;
    c10::cuda::CUDACachingAllocator::allocator = &allocator();
  }
  return failure;
}

int64_t memfit_arena_cuda_end_step(void* handle, int64_t* counts) {
  const int64_t requests = memfit_arena_end_step(handle, counts);
  step_aside();
  return requests;
}

// Where slabs of the calling thread's arenas are allocated.
void memfit_arena_cuda_place_slabs(int device, void* stream) {
  slab_place = {static_cast<c10::DeviceIndex>(device), static_cast<cudaStream_t>(stream)};
}

// Whether the arena's allocator is the one that torch asks.
int memfit_arena_cuda_is_in_front() {
  return c10::cuda::CUDACachingAllocator::get() == &allocator();
}

}  // extern "C"
