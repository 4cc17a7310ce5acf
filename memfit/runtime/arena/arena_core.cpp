// What the arenas of both devices share: which request gets which address. No torch in here; arena.cpp and
// arena_cuda.cpp include it by arena_calls.cpp, and say where the memory of a slab comes from.
//
// The requests of a step are numbered in order (sekiyama2018, section 4.2: the counter lambda). A plan says for each
// number how many bytes are expected and at which offset of the slab they lie, or that the request outlives the step.
// The plan is a proposal and never trusted: the boundaries of all blocks of a plan cut the slab into segments, a bit for
// each says whether it is taken, and a block is handed out only if all its segments are free. So no two live blocks can
// overlap, whatever the step does.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace memfit {

// The ordinary memory of the device; `owner` is what it came from, and has to be given back to.
void* slab_memory(int64_t bytes, void** owner);
void free_slab_memory(void* pointer, void* owner);
void discard(char* begin, char* end);  // of a slab that stays: nobody will read it again

constexpr int64_t kAlive = -1;
constexpr int64_t kOutlivesStep = -1;
constexpr int64_t kNoNumber = -1;
constexpr size_t kFirstTableSize = 1024;  // a power of two

struct Slab {
  char* base;
  int64_t bytes;
  void* owner;
  int64_t live_blocks = 0;
  bool retired = false;
};

struct Entry {
  void* pointer = nullptr;  // null: the place is empty
  Slab* slab = nullptr;     // null: ordinary memory
  void* owner = nullptr;    // of ordinary memory
  int64_t bytes = 0;
  uint64_t step = 0;
  int64_t number = 0;
};

// Open addressing with linear probing; an erased place is closed by moving entries back.
class Table {
 public:
  Table() : places_(kFirstTableSize) {}

  void insert(const Entry& entry) {
    if (2 * (count_ + 1) > places_.size()) {
      grow();
    }
    size_t at = place_of(entry.pointer);
    while (places_[at].pointer != nullptr) {
      at = next(at);
    }
    places_[at] = entry;
    ++count_;
  }

  const Entry* find(void* pointer) const {
    size_t at = place_of(pointer);
    while (places_[at].pointer != pointer && places_[at].pointer != nullptr) {
      at = next(at);
    }
    return places_[at].pointer == nullptr ? nullptr : &places_[at];
  }

  bool take(void* pointer, Entry* found) {
    const Entry* there = find(pointer);
    if (there == nullptr) {
      return false;
    }
    *found = *there;
    const auto at = static_cast<size_t>(there - places_.data());
    close(at);
    --count_;
    return true;
  }

  template <typename Function>
  void each(Function function) const {
    for (const Entry& entry : places_) {
      if (entry.pointer != nullptr) {
        function(entry);
      }
    }
  }

 private:
  size_t next(size_t at) const {
    return (at + 1) & (places_.size() - 1);
  }

  size_t place_of(void* pointer) const {
    const auto mixed = (reinterpret_cast<uintptr_t>(pointer) >> 6) * UINT64_C(0x9E3779B97F4A7C15);  // Fibonacci hashing
    return (mixed >> 20) & (places_.size() - 1);
  }

  void close(size_t hole) {
    for (size_t at = next(hole); places_[at].pointer != nullptr; at = next(at)) {
      const size_t home = place_of(places_[at].pointer);
      if (((at - home) & (places_.size() - 1)) >= ((at - hole) & (places_.size() - 1))) {
        places_[hole] = places_[at];
        hole = at;
      }
    }
    places_[hole] = Entry{};
  }

  void grow() {
    std::vector<Entry> before(2 * places_.size());
    before.swap(places_);
    count_ = 0;
    for (const Entry& entry : before) {
      if (entry.pointer != nullptr) {
        insert(entry);
      }
    }
  }

  std::vector<Entry> places_;
  size_t count_ = 0;
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
  std::vector<int64_t> seen_bytes;  // of the step that runs, or ran last
  std::vector<int64_t> seen_ends;   // how many requests there had been when it was freed
  Counts counts;
};

enum class Verdict { kServed, kOrdinary, kTracked };  // kTracked: ordinary memory whose free has to be seen

struct State {
  std::mutex mutex;
  Table table;
  Arena* running = nullptr;
  const Plan* plan = nullptr;
  bool on_track = true;         // every request so far was exactly as expected
  int64_t alive_in_slab = 0;    // of the blocks of this step
  int64_t again = kNoNumber;    // the request whose memory was spilled, and that the next request stands for
  uint64_t step = 0;
  std::vector<uint64_t> taken;  // a bit for each segment of the plan
  std::atomic<uintptr_t> origin{0};  // the thread or stream that is served; 0: none is
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
  arena->seen_bytes.push_back(bytes);
  arena->seen_ends.push_back(kAlive);
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
  *pointer = arena->slab->base + now.plan->offsets[at];
  now.table.insert({*pointer, arena->slab, nullptr, now.plan->bytes[at], now.step, *number});
  ++arena->slab->live_blocks;
  ++now.alive_in_slab;
  ++arena->counts.served;
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
      now.running->seen_ends[entry.number] = static_cast<int64_t>(now.running->seen_bytes.size());
      if (entry.slab != nullptr) {
        now.clear(now.plan->first[entry.number], now.plan->last[entry.number]);
        --now.alive_in_slab;
      }
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
  state().mutex.unlock();
}

inline void watch_forks() {
  static const int registered =
      pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, &after_fork_in_child);
  (void)registered;
}

}  // namespace memfit
