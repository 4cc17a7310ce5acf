// Places: a plan of a step's memory that was made before the step ran. arena_core.cpp includes this file.
//
// The schedule says at which position each storage is made, and the layout where it lies. The step's program says which
// position begins, and each request there gets the place that its turn has, if the order of the op's requests is known,
// or else one of the position's slots, by its bytes, or else room in the spare bytes that the position has for workspaces.
// As everywhere, a place is handed out only if no live block lies there.

#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

namespace memfit {

constexpr int64_t kOutside = -1;  // the offset of a slot that has ordinary memory: it outlives the step
constexpr int32_t kSpare = -1;      // a turn that lies in the spare bytes
constexpr int32_t kElsewhere = -2;  // a turn that stays after its op, and is no result
constexpr int64_t kResult = -1;     // the offset of a turn that is what its slot is for
constexpr int64_t kNowhere = -2;

struct Places {
  int64_t alignment = 1;
  int64_t height = 0;
  std::vector<int32_t> first_slot;  // of each position, and the end of the last
  std::vector<int64_t> slot_bytes, slot_offsets;
  std::vector<int64_t> spare_offsets, spare_bytes;  // of each position
  std::vector<int32_t> first_turn, turn_slots;      // likewise; slots are numbered within their position
  std::vector<int64_t> turn_offsets, turn_bytes;    // within the slot, or the spare bytes

  int64_t positions() const {
    return static_cast<int64_t>(spare_bytes.size());
  }
};

// The blocks that lie in a slab now, by their offsets.
class Taken {
 public:
  void clear() {
    blocks_.clear();
  }

  void add(int64_t begin, int64_t end) {
    blocks_[begin] = end;
  }

  void remove(int64_t begin) {
    blocks_.erase(begin);
  }

  bool is_free(int64_t begin, int64_t end) const {
    const auto after = blocks_.lower_bound(begin);
    if (after != blocks_.end() && after->first < end) {
      return false;
    }
    return after == blocks_.begin() || std::prev(after)->second <= begin;
  }

  // The lowest offset in a range at which so many bytes are free, or kNowhere.
  int64_t first_fit(int64_t begin, int64_t end, int64_t bytes) const {
    auto next = blocks_.lower_bound(begin);
    if (next != blocks_.begin() && std::prev(next)->second > begin) {
      begin = std::prev(next)->second;
    }
    while (next != blocks_.end() && next->first < end && next->first - begin < bytes) {
      begin = std::max(begin, next->second);
      ++next;
    }
    return end - begin >= bytes ? begin : kNowhere;
  }

 private:
  std::map<int64_t, int64_t> blocks_;
};

// Where a step stands in its places: which position it is at, and what was requested there so far.
class Cursor {
 public:
  void begin(const Places* places) {
    places_ = places;
    at(-1);
  }

  void at(int64_t position) {
    position_ = places_ != nullptr && position < places_->positions() ? position : -1;
    turn_ = 0;
    claimed_.assign(position_ < 0 ? 0 : static_cast<size_t>(last_slot() - first_slot()), false);
  }

  int64_t position() const {
    return position_;
  }

  // The offset for a request, kOutside, or kNowhere; `bytes` are aligned.
  int64_t place(int64_t bytes, const Taken& taken, bool* is_occupied) {
    *is_occupied = false;
    if (position_ < 0) {
      return kNowhere;
    }
    int64_t within = kResult;
    const int32_t slot = next_slot(bytes, &within);
    if (slot == kElsewhere) {
      return kOutside;
    }
    const auto at = static_cast<size_t>(position_);
    const int64_t spare = places_->spare_offsets[at];
    if (slot == kSpare && within == kResult) {
      return taken.first_fit(spare, spare + places_->spare_bytes[at], bytes);
    }
    int64_t offset = slot == kSpare ? spare : places_->slot_offsets[static_cast<size_t>(first_slot() + slot)];
    if (slot != kSpare && within == kResult) {
      claimed_[static_cast<size_t>(slot)] = true;
    } else if (offset != kOutside) {
      offset += within;
    }
    *is_occupied = offset != kOutside && !taken.is_free(offset, offset + bytes);
    return *is_occupied ? kNowhere : offset;
  }

 private:
  int32_t first_slot() const {
    return places_->first_slot[static_cast<size_t>(position_)];
  }

  int32_t last_slot() const {
    return places_->first_slot[static_cast<size_t>(position_) + 1];
  }

  // The slot of a request and the offset within; the turn's, or by its bytes once a request came out of turn.
  int32_t next_slot(int64_t bytes, int64_t* within) {
    const int32_t end = places_->first_turn[static_cast<size_t>(position_) + 1];
    const int32_t turn = turn_ < 0 ? end : places_->first_turn[static_cast<size_t>(position_)] + turn_;
    if (turn < end) {
      const auto at = static_cast<size_t>(turn);
      if (places_->turn_bytes[at] == bytes) {
        ++turn_;
        *within = places_->turn_offsets[at];
        return places_->turn_slots[at];
      }
      turn_ = -1;
    }
    for (int32_t slot = 0; slot < static_cast<int32_t>(claimed_.size()); ++slot) {
      if (!claimed_[static_cast<size_t>(slot)] &&
          places_->slot_bytes[static_cast<size_t>(first_slot() + slot)] == bytes) {
        return slot;
      }
    }
    return kSpare;
  }

  const Places* places_ = nullptr;
  int64_t position_ = -1;
  int32_t turn_ = 0;
  std::vector<bool> claimed_;
};

}  // namespace memfit
