// A row's keys by position, whatever parts and slots they are in, as the blocks of attention.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace jaxllm {

class KeyBlocks {
 public:
  // Collects the keys of row b from all parts.
  void build(const std::vector<CachePart>& parts, int64_t b) {
    blocks_.clear();
    span_begin_.clear();
    int32_t last = -1;
    const bool in_order = visit(parts, b, [&](int32_t position, Block::Slot slot) {
      if (position < last) return false;
      last = position;
      add(position, slot);
      return true;
    });
    if (!in_order) build_sorted(parts, b);
  }

  int64_t spans() const { return int64_t(span_begin_.size()); }

  // The blocks of span i; none if there are fewer spans.
  Blocks span(int64_t i) const {
    if (i >= spans()) return {nullptr, nullptr};
    const Block* all = blocks_.data();
    return {all + span_begin_[i], all + (i + 1 < spans() ? span_begin_[i + 1] : blocks_.size())};
  }

 private:
  void build_sorted(const std::vector<CachePart>& parts, int64_t b) {
    struct Key {
      int32_t position;
      Block::Slot slot;
    };
    std::vector<Key> keys;
    visit(parts, b, [&](int32_t position, Block::Slot slot) {
      keys.push_back({position, slot});
      return true;
    });
    std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) { return a.position < b.position; });
    blocks_.clear();
    span_begin_.clear();
    for (const Key& key : keys) add(key.position, key.slot);
  }

  // Calls f with the position and place of each key of row b, until it returns false; returns whether it never did.
  template <class F>
  static bool visit(const std::vector<CachePart>& parts, int64_t b, const F& f) {
    for (size_t p = 0; p < parts.size(); p++) {
      const CachePart& part = parts[p];
      const int64_t count = !part.row || part.shared_k || part.shared_position ? 1 : part.rows_each;
      for (int64_t i = 0; i < count; i++) {
        const int64_t row = !part.row ? b : part.rows == 1 ? 0 : part.row[b * part.rows_each + i];
        if (row < 0 || (part.row && row >= part.rows)) continue;
        const int32_t* position = part.position + (part.shared_position ? 0 : row * part.slots);
        for (int64_t slot = 0; slot < part.slots; slot++)
          if (position[slot] >= 0 && !f(position[slot], {int32_t(p), int32_t(row), int32_t(slot)})) return false;
      }
    }
    return true;
  }

  // Adds the next key. Keys of equal positions are in different blocks.
  void add(int32_t position, Block::Slot slot) {
    const int64_t base = position / kBlock * kBlock, lane = position - base;
    if (blocks_.empty() || blocks_.back().base != base || blocks_.back().lane[lane].part >= 0) {
      if (blocks_.empty() || blocks_.back().base / kSpan != base / kSpan) span_begin_.push_back(blocks_.size());
      blocks_.emplace_back();
      blocks_.back().base = base;
      for (Block::Slot& slot_at_lane : blocks_.back().lane) slot_at_lane = {-1, 0, 0};
    }
    blocks_.back().lane[lane] = slot;
  }

  std::vector<Block> blocks_;
  std::vector<size_t> span_begin_;  // of spans, in blocks
};

}  // namespace jaxllm
