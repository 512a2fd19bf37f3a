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
    for (size_t p = 0; p < parts.size(); p++) {
      const int32_t* position =
          parts[p].position + (parts[p].shared_position ? 0 : parts[p].row_of(b) * parts[p].slots);
      for (int64_t slot = 0; slot < parts[p].slots; slot++) {
        if (position[slot] < 0) continue;
        if (position[slot] < last) return build_sorted(parts, b);
        last = position[slot];
        add(last, int32_t(p), int32_t(slot));
      }
    }
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
      int32_t position, part, slot;
    };
    std::vector<Key> keys;
    for (size_t p = 0; p < parts.size(); p++) {
      const int32_t* position =
          parts[p].position + (parts[p].shared_position ? 0 : parts[p].row_of(b) * parts[p].slots);
      for (int64_t slot = 0; slot < parts[p].slots; slot++)
        if (position[slot] >= 0) keys.push_back({position[slot], int32_t(p), int32_t(slot)});
    }
    std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) { return a.position < b.position; });
    blocks_.clear();
    span_begin_.clear();
    for (const Key& key : keys) add(key.position, key.part, key.slot);
  }

  // Adds the next key. Keys of equal positions are in different blocks.
  void add(int32_t position, int32_t part, int32_t slot) {
    const int64_t base = position / kBlock * kBlock, lane = position - base;
    if (blocks_.empty() || blocks_.back().base != base || blocks_.back().lane[lane].part >= 0) {
      if (blocks_.empty() || blocks_.back().base / kSpan != base / kSpan) span_begin_.push_back(blocks_.size());
      blocks_.emplace_back();
      blocks_.back().base = base;
      for (Block::Slot& slot_at_lane : blocks_.back().lane) slot_at_lane = {-1, 0};
    }
    blocks_.back().lane[lane] = {part, slot};
  }

  std::vector<Block> blocks_;
  std::vector<size_t> span_begin_;  // of spans, in blocks
};

}  // namespace jaxllm
