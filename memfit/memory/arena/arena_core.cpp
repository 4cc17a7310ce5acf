// What the arenas of both devices share: which request gets which address. No torch in here; arena.cpp and
// arena_cuda.cpp include it by arena_calls.cpp, and say where the memory of a slab comes from.
//
// The requests of a step are numbered in order (sekiyama2018, section 4.2: the counter lambda). A plan says for each
// number how many bytes are expected and at which offset of the slab they lie, or that the request outlives the step.
// The plan is a proposal and never trusted: the boundaries of all blocks of a plan cut the slab into segments, a bit for
// each says whether it is taken, and a block is handed out only if all its segments are free. So no two live blocks can
// overlap, whatever the step does. A plan that is made before a step has places in its stead: see arena_places.cpp.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena_places.cpp"
#include "arena_table.cpp"

namespace memfit {

// The ordinary memory of the device; `owner` is what it came from, and has to be given back to.
void* slab_memory(int64_t bytes, void** owner);
void free_slab_memory(void* pointer, void* owner);
void discard(char* begin, char* end);  // of a slab that stays: nobody will read it again

constexpr int64_t kAlive = -1;
constexpr int64_t kOutlivesStep = -1;
constexpr int64_t kNoNumber = -1;

struct Slab {
  char* base;
  int64_t bytes;
  void* owner;
  int64_t live_blocks = 0;
  bool retired = false;
  Taken taken;  // up to date while a step with places runs
};

struct Plan {
  std::vector<int64_t> expected;  // bytes that were requested
  std::vector<int64_t> bytes;     // rounded up: a request that grows into them is served
  std::vector<int64_t> offsets;   // kOutlivesStep: not in the slab
  std::vector<int64_t> cuts;      // where segments begin, and the end of the last
  std::vector<uint32_t> first;    // segments of each block, half-open
  std::vector<uint32_t> last;
};

struct Counts {  // of one step; arena_library.py reads them in this order
  int64_t served = 0;
  int64_t outliving = 0;
  int64_t recorded = 0;    // there was no plan
  int64_t unexpected = 0;  // larger than expected, or beyond the last expected
  int64_t occupied = 0;    // its address was still taken
  int64_t other_threads = 0;
  int64_t kept = 0;        // blocks of the slab still alive when the step ended
};
constexpr int kCounts = sizeof(Counts) / sizeof(int64_t);

struct Arena {
  Slab* slab = nullptr;
  std::unordered_map<int64_t, Plan> plans;
  std::unordered_map<int64_t, Places> places;
  // Of the step that runs, or ran last. Its clock counts requests, and in a step with places positions too.
  std::vector<int64_t> seen_bytes;
  std::vector<int64_t> seen_ends;                                   // the clock when it was freed
  std::vector<int64_t> seen_starts, seen_positions, seen_offsets;  // of a step with places
  std::vector<int64_t> begun_at;                                    // the clock at the begin of each position in turn
  Counts counts;

  int64_t clock() const {
    return static_cast<int64_t>(seen_bytes.size() + begun_at.size());
  }
};

enum class Verdict { kServed, kOrdinary, kTracked };  // kTracked: ordinary memory whose free has to be seen

struct State {
  std::mutex mutex;
  Table table;
  Arena* running = nullptr;
  const Plan* plan = nullptr;
  const Places* places = nullptr;
  Cursor cursor;
  bool on_track = true;         // every request so far was exactly as expected
  int64_t alive_in_slab = 0;    // of the blocks of this step
  int64_t again = kNoNumber;    // the request whose memory was spilled, and that the next request stands for
  uint64_t step = 0;
  std::vector<uint64_t> taken;  // a bit for each segment of the plan
  std::atomic<uintptr_t> origin{0};  // the thread or stream that is served; 0: none is
  std::atomic<uintptr_t> thread{0};  // a stream is served for this thread alone; 0: for all threads
  uintptr_t interrupted_origin = 0;
  std::atomic<int64_t> other_threads{0};

  bool is_free(uint32_t first, uint32_t last) const {
    return walk(first, last, [this](size_t word, uint64_t bits) { return (taken[word] & bits) == 0; });
  }

  void mark(uint32_t first, uint32_t last) {
    walk(first, last, [this](size_t word, uint64_t bits) { return taken[word] |= bits, true; });
  }

  void clear(uint32_t first, uint32_t last) {
    walk(first, last, [this](size_t word, uint64_t bits) { return taken[word] &= ~bits, true; });
  }

  // The same for a step with places, exactly.
  void take_left_behind(Slab* slab) {
    slab->taken.clear();
    if (slab->live_blocks != 0) {
      table.each([slab](const Entry& entry) {
        if (entry.slab == slab) {
          const int64_t begin = static_cast<char*>(entry.pointer) - slab->base;
          slab->taken.add(begin, begin + entry.bytes);
        }
      });
    }
  }

  // Blocks that earlier steps left behind hold whatever segments they touch, to the end of the step.
  void mark_left_behind(const Slab* slab) {
    table.each([this, slab](const Entry& entry) {
      if (entry.slab != slab) {
        return;
      }
      const int64_t begin = static_cast<char*>(entry.pointer) - slab->base;
      const auto& cuts = plan->cuts;
      if (cuts.empty() || begin >= cuts.back()) {
        return;
      }
      const auto first = std::upper_bound(cuts.begin(), cuts.end(), begin) - cuts.begin();
      const auto last = std::lower_bound(cuts.begin(), cuts.end() - 1, begin + entry.bytes) - cuts.begin();
      if (last > 0) {
        mark(static_cast<uint32_t>(std::max<int64_t>(first - 1, 0)), static_cast<uint32_t>(last));
      }
    });
  }

 private:
  template <typename Function>
  static bool walk(uint32_t first, uint32_t last, Function function) {
    for (uint32_t at = first; at < last;) {
      const uint32_t word = at / 64, begin = at % 64, end = std::min<uint32_t>(64, begin + (last - at));
      const uint64_t bits = (~UINT64_C(0) >> (64 - (end - begin))) << begin;
      if (!function(word, bits)) {
        return false;
      }
      at += end - begin;
    }
    return true;
  }
};

// Never destroyed: tensors are still freed while the process tears down its statics.
inline State& state() {
  static State* the_state = new State;
  return *the_state;
}

inline void serve(State& now, Arena* arena, int64_t offset, int64_t bytes, int64_t number, void** pointer) {
  *pointer = arena->slab->base + offset;
  now.table.insert({*pointer, arena->slab, nullptr, bytes, now.step, number});
  ++arena->slab->live_blocks;
  ++now.alive_in_slab;
  ++arena->counts.served;
}

// As `request`, in a step with places.
inline Verdict request_place(State& now, Arena* arena, int64_t requested_bytes, void** pointer, int64_t number) {
  const int64_t alignment = now.places->alignment;
  const int64_t bytes = (requested_bytes + alignment - 1) / alignment * alignment;
  bool is_occupied = false;
  const Taken none;
  const Taken& taken = arena->slab == nullptr ? none : arena->slab->taken;
  const int64_t offset = now.cursor.place(bytes, taken, &is_occupied);
  arena->seen_positions.push_back(now.cursor.position());
  arena->seen_offsets.push_back(offset);
  if (offset == kOutside) {
    ++arena->counts.outliving;
    return Verdict::kOrdinary;
  }
  if (offset == kNowhere) {
    ++(is_occupied ? arena->counts.occupied : arena->counts.unexpected);
    return Verdict::kTracked;
  }
  arena->slab->taken.add(offset, offset + bytes);
  serve(now, arena, offset, bytes, number, pointer);
  return Verdict::kServed;
}

// Asked for every request that comes from the origin of the running step.
inline Verdict request(int64_t bytes, void** pointer, int64_t* number) {
  State& now = state();
  std::lock_guard<std::mutex> guard(now.mutex);
  Arena* arena = now.running;
  if (arena == nullptr || now.origin.load(std::memory_order_relaxed) == 0) {
    return Verdict::kOrdinary;
  }
  if (now.again != kNoNumber) {
    *number = std::exchange(now.again, kNoNumber);
    return Verdict::kTracked;
  }
  *number = static_cast<int64_t>(arena->seen_bytes.size());
  if (now.places != nullptr) {
    arena->seen_starts.push_back(arena->clock());
  }
  arena->seen_bytes.push_back(bytes);
  arena->seen_ends.push_back(kAlive);
  if (now.places != nullptr) {
    return request_place(now, arena, bytes, pointer, *number);
  }
  if (now.plan == nullptr) {
    ++arena->counts.recorded;
    return Verdict::kTracked;
  }
  const auto at = static_cast<size_t>(*number);
  if (at >= now.plan->bytes.size()) {
    ++arena->counts.unexpected;
    return Verdict::kTracked;
  }
  now.on_track = now.on_track && bytes == now.plan->expected[at];
  if (now.plan->offsets[at] == kOutlivesStep) {
    ++arena->counts.outliving;
    // While all is as expected, so will its end be; looking at it would cost what tracking costs.
    return now.on_track ? Verdict::kOrdinary : Verdict::kTracked;
  }
  const uint32_t first = now.plan->first[at], last = now.plan->last[at];
  if (bytes > now.plan->bytes[at]) {
    ++arena->counts.unexpected;
    return Verdict::kTracked;
  }
  if (!now.is_free(first, last)) {
    ++arena->counts.occupied;
    return Verdict::kTracked;
  }
  now.mark(first, last);
  serve(now, arena, now.plan->offsets[at], now.plan->bytes[at], *number, pointer);
  return Verdict::kServed;
}

// Remembers ordinary memory, whose request was answered with kTracked.
inline void track(void* pointer, int64_t bytes, int64_t number, void* owner) {
  State& now = state();
  std::lock_guard<std::mutex> guard(now.mutex);
  now.table.insert({pointer, nullptr, owner, bytes, now.step, number});
}

// Forgets a pointer. True: it lay in a slab and is done with; false: it is ordinary, `owner` is null if unknown.
inline bool release(void* pointer, void** owner) {
  State& now = state();
  Entry entry;
  Slab* done_with = nullptr;
  *owner = nullptr;
  {
    std::lock_guard<std::mutex> guard(now.mutex);
    if (!now.table.take(pointer, &entry)) {
      return false;
    }
    if (now.running != nullptr && entry.step == now.step) {
      now.running->seen_ends[entry.number] = now.running->clock();
      if (entry.slab != nullptr) {
        if (now.plan != nullptr) {
          now.clear(now.plan->first[entry.number], now.plan->last[entry.number]);
        }
        --now.alive_in_slab;
      }
    }
    if (now.places != nullptr && entry.slab != nullptr && entry.slab == now.running->slab) {
      entry.slab->taken.remove(static_cast<char*>(pointer) - entry.slab->base);
    }
    if (entry.slab != nullptr && --entry.slab->live_blocks == 0 && entry.slab->retired) {
      done_with = entry.slab;
    }
  }
  if (done_with != nullptr) {
    free_slab_memory(done_with->base, done_with->owner);
    delete done_with;
  }
  *owner = entry.owner;
  return entry.slab != nullptr;
}

// The slab goes when the last of its blocks does; what lies between them can go before.
inline void retire(Slab* slab) {
  if (slab == nullptr) {
    return;
  }
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    slab->retired = true;
    if (slab->live_blocks != 0) {
      std::vector<std::pair<char*, char*>> live{{slab->base + slab->bytes, nullptr}};
      state().table.each([&live, slab](const Entry& entry) {
        if (entry.slab == slab) {
          auto* begin = static_cast<char*>(entry.pointer);
          live.emplace_back(begin, begin + entry.bytes);
        }
      });
      std::sort(live.begin(), live.end());
      char* gap = slab->base;
      for (const auto& [begin, end] : live) {
        discard(gap, begin);
        gap = end;
      }
      return;
    }
  }
  free_slab_memory(slab->base, slab->owner);
  delete slab;
}

// A fork copies only the calling thread; the child has no running step, and no lock that another thread holds.
inline void after_fork_in_child() {
  state().origin = 0;
  state().running = nullptr;
  state().plan = nullptr;
  state().places = nullptr;
  state().mutex.unlock();
}

inline void watch_forks() {
  static const int registered =
      pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, &after_fork_in_child);
  (void)registered;
}

}  // namespace memfit
