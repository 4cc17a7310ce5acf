// The blocks that an arena answers for, by their addresses. arena_core.cpp includes this file.

#include <cstdint>
#include <vector>

namespace memfit {

struct Slab;

constexpr size_t kFirstTableSize = 1024;  // a power of two

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

  bool empty() const {
    return count_ == 0;
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

}  // namespace memfit
