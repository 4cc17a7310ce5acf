// Counts the bytes that torch asks the CPU allocator for: live now, and the peak inside each open window.
//
// Sizes are kept in a table beside the memory and not in a header before it, so that addresses stay those of the wrapped
// allocator, and memory that was handed out before this one was installed can be freed through it without being counted.

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include <c10/core/CPUAllocator.h>

namespace {

constexpr int kShards = 64;   // threads that allocate at once rarely meet in one of them
constexpr int kWindows = 64;  // bits of the mask of open windows

struct Shard {
  std::mutex mutex;
  std::unordered_map<void*, int64_t> bytes_of;
};

struct Counts {
  c10::Allocator* wrapped = nullptr;
  c10::Allocator* recording = nullptr;
  std::atomic<int64_t> live_bytes{0};
  std::atomic<uint64_t> open_windows{0};
  std::array<std::atomic<int64_t>, kWindows> peak_bytes{};
  std::array<Shard, kShards> shards;

  Shard& shard_of(void* pointer) {
    const auto mixed = (reinterpret_cast<uintptr_t>(pointer) >> 6) * UINT64_C(0x9E3779B97F4A7C15);  // Fibonacci hashing
    return shards[mixed >> 58];
  }
};

// Never destroyed: tensors are still freed while the process tears down its statics.
Counts& counts() {
  static Counts* the_counts = new Counts;
  return *the_counts;
}

void raise_to(std::atomic<int64_t>& peak, int64_t bytes) {
  int64_t seen = peak.load();
  while (seen < bytes && !peak.compare_exchange_weak(seen, bytes)) {
  }
}

void count_allocation(void* pointer, int64_t bytes) {
  {
    Shard& shard = counts().shard_of(pointer);
    std::lock_guard<std::mutex> guard(shard.mutex);
    shard.bytes_of[pointer] = bytes;
  }
  const int64_t live = counts().live_bytes.fetch_add(bytes) + bytes;
  for (uint64_t open = counts().open_windows.load(); open != 0; open &= open - 1) {
    raise_to(counts().peak_bytes[__builtin_ctzll(open)], live);
  }
}

void count_and_free(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  {
    Shard& shard = counts().shard_of(pointer);
    std::lock_guard<std::mutex> guard(shard.mutex);
    const auto entry = shard.bytes_of.find(pointer);
    if (entry != shard.bytes_of.end()) {
      counts().live_bytes.fetch_sub(entry->second);
      shard.bytes_of.erase(entry);
    }
  }
  counts().wrapped->raw_deallocate(pointer);
}

struct RecordingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = counts().wrapped->allocate(bytes);
    void* pointer = memory.get();
    if (pointer == nullptr) {
      return memory;
    }
    const c10::Device device = memory.device();
    memory.release_context();
    count_allocation(pointer, static_cast<int64_t>(bytes));
    return {pointer, pointer, &count_and_free, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &count_and_free;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    counts().wrapped->copy_data(to, from, bytes);
  }
};

// A fork copies only the calling thread: a lock that another thread holds would stay locked in the child for ever.
void lock_all() {
  for (Shard& shard : counts().shards) {
    shard.mutex.lock();
  }
}

void unlock_all() {
  for (Shard& shard : counts().shards) {
    shard.mutex.unlock();
  }
}

}  // namespace

extern "C" {

// 0: installed. 1: the current allocator has no raw deleter and cannot be wrapped. 2: a stronger allocator stays.
int memfit_recorder_install() {
  if (counts().recording != nullptr) {
    return 0;
  }
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current->raw_deleter() == nullptr) {
    return 1;
  }
  auto* recording = new RecordingAllocator;
  counts().wrapped = current;
  c10::SetCPUAllocator(recording);
  if (c10::GetCPUAllocator() != recording) {
    delete recording;
    return 2;
  }
  counts().recording = recording;
  pthread_atfork(&lock_all, &unlock_all, &unlock_all);
  return 0;
}

int64_t memfit_recorder_live_bytes() {
  return counts().live_bytes.load();
}

// Opens a window and stores the live bytes. Gives its number; -1: all windows are open; -2: the allocator was replaced.
int memfit_recorder_open(int64_t* live_bytes) {
  if (c10::GetCPUAllocator() != counts().recording) {
    return -2;
  }
  uint64_t open = counts().open_windows.load();
  for (;;) {
    if (~open == 0) {
      return -1;
    }
    const int window = __builtin_ctzll(~open);
    if (!counts().open_windows.compare_exchange_weak(open, open | (UINT64_C(1) << window))) {
      continue;
    }
    *live_bytes = counts().live_bytes.load();
    counts().peak_bytes[window].store(*live_bytes);
    return window;
  }
}

// Closes a window and stores its peak. Gives the live bytes.
int64_t memfit_recorder_close(int window, int64_t* peak_bytes) {
  counts().open_windows.fetch_and(~(UINT64_C(1) << window));
  *peak_bytes = counts().peak_bytes[window].load();
  return counts().live_bytes.load();
}

}  // extern "C"
