// Counts the bytes that torch takes from the CPU allocator: live now, and the peak inside each open window. A window counts
// what the thread that opened it allocates, and what threads without Python of their own do, such as those of OpenMP.
//
// Sizes are kept in a table beside the memory and not in a header before it, so that addresses stay those of the wrapped
// allocator, and memory that was handed out before this one was installed can be freed through it without being counted.
//
// A thread can have a limit: before it takes memory that would pass the limit, a function of Python is asked to make room.

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_map>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

// Of Python's stable ABI, whose headers may not be installed.
extern "C" void* PyGILState_GetThisThreadState(void);
extern "C" int Py_IsInitialized(void);

namespace {

constexpr int kShards = 64;   // threads that allocate at once rarely meet in one of them
constexpr int64_t kAlignment = 64;  // c10/core/alignment.h, gAlignment: a request takes a multiple of it
constexpr int kWindows = 64;  // bits of the mask of open windows

// A thread that runs Python, by its state; a thread that works for others, as OpenMP's do, is nullptr.
using Owner = void*;

struct Block {
  int64_t bytes;
  Owner owner;
};

struct Shard {
  std::mutex mutex;
  std::unordered_map<void*, Block> block_of;
};

struct Window {
  std::atomic<Owner> owner{nullptr};
  std::atomic<int64_t> live_bytes{0};
  std::atomic<int64_t> peak_bytes{0};
};

struct Counts {
  c10::Allocator* wrapped = nullptr;
  c10::Allocator* recording = nullptr;
  std::atomic<int64_t> live_bytes{0};
  std::atomic<uint64_t> taken_windows{0};
  std::atomic<uint64_t> open_windows{0};  // those of the taken ones that count
  std::array<Window, kWindows> windows;
  std::array<Shard, kShards> shards;

  Shard& shard_of(void* pointer) {
    const auto mixed = (reinterpret_cast<uintptr_t>(pointer) >> 6) * UINT64_C(0x9E3779B97F4A7C15);  // Fibonacci hashing
    return shards[mixed >> 58];
  }
};

// Makes room for memory of so many bytes; not 0 if there is none, and the memory must not be taken.
using MakeRoom = int (*)(int64_t bytes);

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

struct Limit {
  int64_t live_bytes = kNoLimit;  // that the thread may see when it has taken memory
  MakeRoom make_room = nullptr;
  bool is_asking = false;  // memory that is taken while room is made is not asked for
};

thread_local Limit limit;
thread_local std::string refusal;  // why the memory must not be taken

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

// Adds to the windows of the owner; to all windows where a thread allocates for an owner that is not known.
void add_to_windows(int64_t bytes, Owner owner) {
  for (uint64_t open = counts().open_windows.load(); open != 0; open &= open - 1) {
    Window& window = counts().windows[__builtin_ctzll(open)];
    if (owner == nullptr || owner == window.owner.load()) {
      raise_to(window.peak_bytes, window.live_bytes.fetch_add(bytes) + bytes);
    }
  }
}

int64_t aligned(size_t requested_bytes) {
  return (static_cast<int64_t>(requested_bytes) + kAlignment - 1) / kAlignment * kAlignment;
}

struct Asking {
  Asking() {
    limit.is_asking = true;
  }
  ~Asking() {
    limit.is_asking = false;
  }
  // Python calls operators outside of any mode, transformation or kernel, wherever the memory is taken.
  c10::impl::ForceDispatchKeyGuard outside{c10::default_included_set, c10::default_excluded_set};
};

void ask_for(int64_t bytes) {
  if (counts().live_bytes.load() + bytes <= limit.live_bytes || limit.is_asking || !Py_IsInitialized()) {
    return;
  }
  int is_refused = 0;
  {
    const Asking asking;
    is_refused = limit.make_room(bytes);
  }
  if (is_refused != 0) {
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, refusal);
  }
}

void count_allocation(void* pointer, int64_t bytes) {
  const Owner owner = PyGILState_GetThisThreadState();
  {
    Shard& shard = counts().shard_of(pointer);
    std::lock_guard<std::mutex> guard(shard.mutex);
    shard.block_of[pointer] = {bytes, owner};
  }
  counts().live_bytes.fetch_add(bytes);
  add_to_windows(bytes, owner);
}

void count_and_free(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  {
    Shard& shard = counts().shard_of(pointer);
    std::lock_guard<std::mutex> guard(shard.mutex);
    const auto entry = shard.block_of.find(pointer);
    if (entry != shard.block_of.end()) {
      counts().live_bytes.fetch_sub(entry->second.bytes);
      add_to_windows(-entry->second.bytes, entry->second.owner);
      shard.block_of.erase(entry);
    }
  }
  counts().wrapped->raw_deallocate(pointer);
}

struct RecordingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (limit.live_bytes != kNoLimit) {
      ask_for(aligned(bytes));
    }
    c10::DataPtr memory = counts().wrapped->allocate(bytes);
    void* pointer = memory.get();
    if (pointer == nullptr) {
      return memory;
    }
    const c10::Device device = memory.device();
    memory.release_context();
    count_allocation(pointer, aligned(bytes));
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

// A worker that is forked inside of a limit has memory of its own.
void begin_child() {
  limit = Limit{};
  unlock_all();
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
  pthread_atfork(&lock_all, &unlock_all, &begin_child);
  return 0;
}

int64_t memfit_recorder_live_bytes() {
  return counts().live_bytes.load();
}

// Whether memory was taken after the recorder was installed, and counts.
int memfit_recorder_knows(void* pointer) {
  Shard& shard = counts().shard_of(pointer);
  std::lock_guard<std::mutex> guard(shard.mutex);
  return shard.block_of.count(pointer) != 0;
}

// Whether what is allocated now is counted: no other allocator was put in front.
int memfit_recorder_counts() {
  return c10::GetCPUAllocator() == counts().recording;
}

// Opens a window and stores the live bytes. Gives its number; -1: all windows are open; -2: the allocator was replaced.
int memfit_recorder_open(int64_t* live_bytes) {
  if (!memfit_recorder_counts()) {
    return -2;
  }
  uint64_t taken = counts().taken_windows.load();
  while (~taken != 0 && !counts().taken_windows.compare_exchange_weak(taken, taken | (taken + 1))) {
  }
  if (~taken == 0) {
    return -1;
  }
  const int number = __builtin_ctzll(~taken);  // the lowest free one, which is the bit that is added above
  Window& window = counts().windows[number];
  window.owner.store(PyGILState_GetThisThreadState());
  window.live_bytes.store(0);
  window.peak_bytes.store(0);
  *live_bytes = counts().live_bytes.load();
  counts().open_windows.fetch_or(UINT64_C(1) << number);
  return number;
}

// Closes a window and stores its peak. Gives its live bytes. Both are relative to what was live when it was opened.
int64_t memfit_recorder_close(int number, int64_t* peak_bytes) {
  const uint64_t others = ~(UINT64_C(1) << number);
  counts().open_windows.fetch_and(others);
  *peak_bytes = counts().windows[number].peak_bytes.load();
  const int64_t live_bytes = counts().windows[number].live_bytes.load();
  counts().taken_windows.fetch_and(others);
  return live_bytes;
}

// Sets the limit of the calling thread: the live bytes beyond which `make_room` is asked; nullptr ends it.
void memfit_recorder_limit(int64_t live_bytes, MakeRoom make_room) {
  limit.live_bytes = make_room == nullptr ? kNoLimit : live_bytes;
  limit.make_room = make_room;
}

// Says why memory must not be taken that the calling thread is asked for.
void memfit_recorder_refuse(const char* why) {
  refusal = why;
}

}  // extern "C"
