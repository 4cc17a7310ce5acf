// The arena on CPU: torch's CPU allocator while a step runs. Requests of the step's thread are asked of arena_core.cpp;
// all others, and all that it does not serve, go to the allocator that was in place (torch's own, or memfit's recorder).

#include "arena_calls.cpp"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>

#include <c10/core/CPUAllocator.h>

namespace {

constexpr size_t kProbeBytes = 64;

// Never null once a step has begun. It only ever changes between steps.
std::atomic<c10::Allocator*> below{nullptr};
std::atomic<uintptr_t> prober{0};
std::atomic<bool> probe_arrived{false};

uintptr_t this_thread() {
  return reinterpret_cast<uintptr_t>(reinterpret_cast<void*>(pthread_self()));
}

void release_or_free(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  void* owner = nullptr;
  if (!memfit::release(pointer, &owner)) {
    (owner == nullptr ? below.load() : static_cast<c10::Allocator*>(owner))->raw_deallocate(pointer);
  }
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const uintptr_t served = memfit::state().origin.load(std::memory_order_relaxed);
    if (served == 0 || bytes == 0) {
      if (prober.load(std::memory_order_relaxed) == this_thread()) {
        probe_arrived = true;
      }
      return below.load()->allocate(bytes);
    }
    if (served != this_thread()) {
      memfit::state().other_threads.fetch_add(1, std::memory_order_relaxed);
      return below.load()->allocate(bytes);
    }
    void* pointer = nullptr;
    int64_t number = 0;
    switch (memfit::request(static_cast<int64_t>(bytes), &pointer, &number)) {
      case memfit::Verdict::kServed:
        return {pointer, pointer, &release_or_free, c10::Device(c10::DeviceType::CPU)};
      case memfit::Verdict::kTracked:
        return tracked(bytes, number);
      case memfit::Verdict::kOrdinary:
        break;
    }
    return below.load()->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release_or_free;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static c10::DataPtr tracked(size_t bytes, int64_t number) {
    c10::Allocator* owner = below.load();
    c10::DataPtr memory = owner->allocate(bytes);
    void* pointer = memory.get();
    if (pointer == nullptr || pointer != memory.get_context()) {
      return memory;  // it seems to outlive the step, so it will not be in the slab
    }
    const c10::Device device = memory.device();
    memory.release_context();
    memfit::track(pointer, static_cast<int64_t>(bytes), number, owner);
    return {pointer, pointer, &release_or_free, device};
  }
};

// Never destroyed: storages remember the allocator that they may have to grow with.
ArenaAllocator& allocator() {
  static auto* the_allocator = new ArenaAllocator;
  return *the_allocator;
}

// Whether requests to the allocator in place come here; another allocator may have been put in front of this one.
bool is_reached() {
  if (below.load() == nullptr) {
    return false;
  }
  probe_arrived = false;
  prober = this_thread();
  c10::GetCPUAllocator()->allocate(kProbeBytes).clear();
  prober = 0;
  return probe_arrived;
}

}  // namespace

namespace memfit {

void* slab_memory(int64_t bytes, void** owner) {
  c10::Allocator* from = c10::GetCPUAllocator();
  *owner = from;
  try {
    return from->raw_allocate(static_cast<size_t>(bytes));
  } catch (const c10::Error&) {
    return nullptr;
  }
}

void free_slab_memory(void* pointer, void* owner) {
  static_cast<c10::Allocator*>(owner)->raw_deallocate(pointer);
}

// The pages go back to the system; the addresses stay.
void discard(char* begin, char* end) {
#ifdef MADV_DONTNEED
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page * page;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
#endif
}

}  // namespace memfit

extern "C" {

// As memfit_arena_begin_step, for the calling thread. 3: the allocator in place cannot be wrapped. 4: a stronger
// allocator stays.
int memfit_arena_cpu_begin_step(void* handle, int64_t plan_id) {
  if (memfit::state().running != nullptr) {
    return 1;
  }
  if (!is_reached()) {
    c10::Allocator* current = c10::GetCPUAllocator();
    if (current->raw_deleter() == nullptr) {
      return 3;
    }
    below = current;
    c10::SetCPUAllocator(&allocator());
    if (c10::GetCPUAllocator() != &allocator()) {
      return 4;
    }
  }
  const int failure = memfit_arena_begin_step(handle, plan_id, this_thread());
  if (failure != 0 && c10::GetCPUAllocator() == &allocator()) {
    c10::SetCPUAllocator(below.load());
  }
  return failure;
}

// As memfit_arena_end_step; puts the allocator back that was in place, unless another one was put in front.
int64_t memfit_arena_cpu_end_step(void* handle, int64_t* counts) {
  const int64_t requests = memfit_arena_end_step(handle, counts);
  if (c10::GetCPUAllocator() == &allocator()) {
    c10::SetCPUAllocator(below.load());
  }
  return requests;
}

// For tests: a request to the arena's allocator as a kernel would make it, and its free. A step must have begun before.
void* memfit_arena_test_allocate(int64_t bytes) {
  return allocator().raw_allocate(static_cast<size_t>(bytes));
}

void memfit_arena_test_free(void* pointer) {
  allocator().raw_deallocate(pointer);
}

// Nanoseconds that a list of requests (bytes) and frees (-1 - number of the request) takes, touching no memory.
int64_t memfit_arena_time(int64_t count, const int64_t* events) {
  std::vector<c10::DataPtr> blocks(static_cast<size_t>(count));
  size_t requests = 0;
  const auto started = std::chrono::steady_clock::now();
  for (int64_t at = 0; at < count; ++at) {
    if (events[at] > 0) {
      blocks[requests++] = c10::GetCPUAllocator()->allocate(static_cast<size_t>(events[at]));
    } else {
      blocks[static_cast<size_t>(-1 - events[at])].clear();
    }
  }
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started).count();
}

}  // extern "C"
