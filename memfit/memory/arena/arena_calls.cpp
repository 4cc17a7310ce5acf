// The calls that both devices share; see arena_library.py.

#include "arena_core.cpp"

extern "C" {

void* memfit_arena_create() {
  memfit::watch_forks();
  return new memfit::Arena;
}

void memfit_arena_destroy(void* handle) {
  auto* arena = static_cast<memfit::Arena*>(handle);
  memfit::retire(arena->slab);
  delete arena;
}

// Gives a number a plan in place of the one it had: bytes as requested, bytes that are there for each, and offsets.
void memfit_arena_set_plan(
    void* handle, int64_t id, int64_t count, const int64_t* expected, const int64_t* bytes, const int64_t* offsets) {
  memfit::Plan plan;
  plan.expected.assign(expected, expected + count);
  plan.bytes.assign(bytes, bytes + count);
  plan.offsets.assign(offsets, offsets + count);
  for (int64_t at = 0; at < count; ++at) {
    if (offsets[at] != memfit::kOutlivesStep) {
      plan.cuts.push_back(offsets[at]);
      plan.cuts.push_back(offsets[at] + bytes[at]);
    }
  }
  std::sort(plan.cuts.begin(), plan.cuts.end());
  plan.cuts.erase(std::unique(plan.cuts.begin(), plan.cuts.end()), plan.cuts.end());
  const auto segment = [&plan](int64_t cut) {
    return static_cast<uint32_t>(std::lower_bound(plan.cuts.begin(), plan.cuts.end(), cut) - plan.cuts.begin());
  };
  for (int64_t at = 0; at < count; ++at) {
    const bool in_slab = offsets[at] != memfit::kOutlivesStep;
    plan.first.push_back(in_slab ? segment(offsets[at]) : 0);
    plan.last.push_back(in_slab ? segment(offsets[at] + bytes[at]) : 0);
  }
  static_cast<memfit::Arena*>(handle)->plans[id] = std::move(plan);
}

// Gives a number places: see arena_places.cpp. `sizes` are the numbers of positions, slots and turns, the alignment and
// the height; `first_slot` and `first_turn` have one number more than there are positions.
void memfit_arena_set_places(
    void* handle, int64_t id, const int64_t* sizes, const int64_t* first_slot, const int64_t* slot_bytes,
    const int64_t* slot_offsets, const int64_t* spare_offsets, const int64_t* spare_bytes, const int64_t* first_turn,
    const int64_t* turn_slots, const int64_t* turn_offsets, const int64_t* turn_bytes) {
  memfit::Places places;
  places.alignment = sizes[3];
  places.height = sizes[4];
  places.first_slot.assign(first_slot, first_slot + sizes[0] + 1);
  places.slot_bytes.assign(slot_bytes, slot_bytes + sizes[1]);
  places.slot_offsets.assign(slot_offsets, slot_offsets + sizes[1]);
  places.spare_offsets.assign(spare_offsets, spare_offsets + sizes[0]);
  places.spare_bytes.assign(spare_bytes, spare_bytes + sizes[0]);
  places.first_turn.assign(first_turn, first_turn + sizes[0] + 1);
  places.turn_slots.assign(turn_slots, turn_slots + sizes[2]);
  places.turn_offsets.assign(turn_offsets, turn_offsets + sizes[2]);
  places.turn_bytes.assign(turn_bytes, turn_bytes + sizes[2]);
  static_cast<memfit::Arena*>(handle)->places[id] = std::move(places);
}

void memfit_arena_drop_plan(void* handle, int64_t id) {
  static_cast<memfit::Arena*>(handle)->plans.erase(id);
  static_cast<memfit::Arena*>(handle)->places.erase(id);
}

// Takes a slab of so many bytes, in place of the one there was. 0: done; 1: there is no memory, and no slab any more.
int memfit_arena_resize(void* handle, int64_t bytes) {
  auto* arena = static_cast<memfit::Arena*>(handle);
  memfit::retire(arena->slab);  // first, so that both are never there at once
  arena->slab = nullptr;
  if (bytes == 0) {
    return 0;
  }
  void* owner = nullptr;
  void* base = memfit::slab_memory(bytes, &owner);
  if (base == nullptr) {
    return 1;
  }
  arena->slab = new memfit::Slab{static_cast<char*>(base), bytes, owner};
  return 0;
}

int64_t memfit_arena_live_blocks(void* handle) {
  auto* arena = static_cast<memfit::Arena*>(handle);
  std::lock_guard<std::mutex> guard(memfit::state().mutex);
  return arena->slab == nullptr ? 0 : arena->slab->live_blocks;
}

int memfit_arena_owns(void* handle, void* pointer) {
  auto* slab = static_cast<memfit::Arena*>(handle)->slab;
  auto* at = static_cast<char*>(pointer);
  return slab != nullptr && at >= slab->base && at < slab->base + slab->bytes;
}

// Begins a step with a plan or with places, or without either (-1). 0: begun; 1: a step is running; 2: a larger slab is
// needed.
int memfit_arena_begin_step(void* handle, int64_t plan_id, uintptr_t origin) {
  auto* arena = static_cast<memfit::Arena*>(handle);
  memfit::State& now = memfit::state();
  std::lock_guard<std::mutex> guard(now.mutex);
  if (now.running != nullptr) {
    return 1;
  }
  const auto found = arena->plans.find(plan_id);
  const memfit::Plan* plan = found == arena->plans.end() ? nullptr : &found->second;
  const int64_t slab_bytes = arena->slab == nullptr ? 0 : arena->slab->bytes;
  const auto placed = arena->places.find(plan_id);
  const memfit::Places* places = placed == arena->places.end() ? nullptr : &placed->second;
  if ((plan != nullptr && !plan->cuts.empty() && plan->cuts.back() > slab_bytes) ||
      (places != nullptr && places->height > slab_bytes)) {
    return 2;
  }
  ++now.step;
  now.running = arena;
  now.plan = plan;
  now.places = places;
  now.cursor.begin(places);
  now.on_track = true;
  now.alive_in_slab = 0;
  now.again = memfit::kNoNumber;
  now.other_threads = 0;
  arena->counts = memfit::Counts{};
  for (auto* seen : {&arena->seen_bytes, &arena->seen_ends, &arena->seen_starts, &arena->seen_positions,
                     &arena->seen_offsets, &arena->begun_at}) {
    seen->clear();
  }
  if (places != nullptr && arena->slab != nullptr) {
    now.take_left_behind(arena->slab);
  }
  if (plan != nullptr) {
    now.taken.assign((plan->cuts.size() + 63) / 64, 0);
    if (arena->slab != nullptr && arena->slab->live_blocks != 0) {
      now.mark_left_behind(arena->slab);
    }
  }
  now.origin = origin;
  return 0;
}

// Ends the running step, stores its counts, and gives the number of requests.
int64_t memfit_arena_end_step(void* handle, int64_t* counts) {
  auto* arena = static_cast<memfit::Arena*>(handle);
  memfit::State& now = memfit::state();
  std::lock_guard<std::mutex> guard(now.mutex);
  now.origin = 0;
  now.thread = 0;
  now.running = nullptr;
  now.plan = nullptr;
  now.places = nullptr;
  now.interrupted_origin = 0;
  arena->counts.other_threads = now.other_threads.load();
  arena->counts.kept = now.alive_in_slab;
  const auto* first = reinterpret_cast<const int64_t*>(&arena->counts);
  std::copy(first, first + memfit::kCounts, counts);
  return static_cast<int64_t>(arena->seen_bytes.size());
}

// Copies what the last step requested: bytes, and how many requests there had been at the free (-1: it outlived).
void memfit_arena_seen(void* handle, int64_t* bytes, int64_t* ends) {
  auto* arena = static_cast<memfit::Arena*>(handle);
  std::copy(arena->seen_bytes.begin(), arena->seen_bytes.end(), bytes);
  std::copy(arena->seen_ends.begin(), arena->seen_ends.end(), ends);
}

// The same of a step with places: the clock at each request and at its free (-1: it outlived, or was not followed), its
// position and its offset (-1: ordinary memory as planned, -2: unplanned).
void memfit_arena_seen_places(
    void* handle, int64_t* bytes, int64_t* starts, int64_t* ends, int64_t* positions, int64_t* offsets) {
  auto* arena = static_cast<memfit::Arena*>(handle);
  std::copy(arena->seen_bytes.begin(), arena->seen_bytes.end(), bytes);
  std::copy(arena->seen_starts.begin(), arena->seen_starts.end(), starts);
  std::copy(arena->seen_ends.begin(), arena->seen_ends.end(), ends);
  std::copy(arena->seen_positions.begin(), arena->seen_positions.end(), positions);
  std::copy(arena->seen_offsets.begin(), arena->seen_offsets.end(), offsets);
}

// The clock at the begin of each position of the last step, in turn; gives their number, and copies if there is an array.
int64_t memfit_arena_begun_at(void* handle, int64_t* clocks) {
  const auto& begun = static_cast<memfit::Arena*>(handle)->begun_at;
  if (clocks != nullptr) {
    std::copy(begun.begin(), begun.end(), clocks);
  }
  return static_cast<int64_t>(begun.size());
}

// The running step begins a position of its schedule.
void memfit_arena_at(int64_t position) {
  memfit::State& now = memfit::state();
  std::lock_guard<std::mutex> guard(now.mutex);
  if (now.places != nullptr) {
    now.running->begun_at.push_back(now.running->clock());
    now.cursor.at(position);
  }
}

// The number of the request of the running step that a pointer answered, or -1.
int64_t memfit_arena_number(void* pointer) {
  memfit::State& now = memfit::state();
  std::lock_guard<std::mutex> guard(now.mutex);
  const memfit::Entry* entry = now.running == nullptr ? nullptr : now.table.find(pointer);
  return entry == nullptr || entry->step != now.step ? memfit::kNoNumber : entry->number;
}

// The next request is no new one: it brings the memory of an earlier one back.
void memfit_arena_again(int64_t number) {
  std::lock_guard<std::mutex> guard(memfit::state().mutex);
  memfit::state().again = number;
}

// A request whose memory was given up before is over only now.
void memfit_arena_ended(int64_t number) {
  memfit::State& now = memfit::state();
  std::lock_guard<std::mutex> guard(now.mutex);
  if (now.running != nullptr && now.running->seen_ends[number] != memfit::kAlive) {
    now.running->seen_ends[number] = static_cast<int64_t>(now.running->seen_bytes.size());
  }
}

void memfit_arena_interrupt() {
  memfit::state().interrupted_origin = memfit::state().origin.exchange(0);
}

void memfit_arena_resume() {
  memfit::state().origin = memfit::state().interrupted_origin;
}

}  // extern "C"
