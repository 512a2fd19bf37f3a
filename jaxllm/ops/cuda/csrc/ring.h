// The weight on its way: a warp's own ring of stages, filled by copies while the warp computes.
//
// A stage is 128 bytes of each of 16 rows, so two units, and the values of their groups. The ring
// runs on from one tile of rows to the next, and needs no barrier but its warp's.
#pragma once

#include "epilogues.h"
#include "formats.h"

namespace jaxllm {

constexpr int PARTS = 8, THREADS = 32 * PARTS, TILE_ROWS = 16;

// Which part of the columns this warp adds up, and which share of x its block has. A cluster of C
// blocks takes C tiles of rows at a time; a block has 8 / C parts of each, and ends one of them.
template <class Format, int C>
struct Place {
  static constexpr int SHARE = PARTS / C;  // parts in a block
  int lane, warp, rank, tile, part;        // the block's rank in its cluster; tile of the C
  int first, end;                          // units of the part
  int share_first, share_end;              // units of the block's parts
  DEVICE explicit Place(int columns) {
    const int steps = Format::units(columns) / Format::STEP;
    lane = thread_index() % 32;
    warp = thread_index() / 32;
    rank = C == 1 ? 0 : block_index() % C;
    tile = warp / SHARE;
    part = rank * SHARE + warp % SHARE;
    first = steps * part / PARTS * Format::STEP;
    end = steps * (part + 1) / PARTS * Format::STEP;
    share_first = steps * (rank * SHARE) / PARTS * Format::STEP;
    share_end = steps * ((rank + 1) * SHARE) / PARTS * Format::STEP;
  }
};

// The scales or zero points of a stage, BYTES for each group of each row. They are copied as
// aligned pieces of a row by two lanes in turn, so the first group may begin within the first
// piece.
template <int BYTES, int GROUP, class Format>
struct GroupValues {
  // Whether stages are of whole groups; or a unit is half a group, and parts begin with any.
  static constexpr bool SEVERAL = Format::STEP * Format::UNIT >= GROUP;
  static constexpr int STAGE = 2 * Format::UNIT * BYTES / GROUP;
  static constexpr int ALIGNED = SEVERAL ? STAGE / 2 : BYTES;
  static constexpr int LANE_BYTES = ALIGNED < 4 ? 4 : ALIGNED;
  static constexpr int POWER = LANE_BYTES & -LANE_BYTES, PIECE = POWER < 16 ? POWER : 16;
  static constexpr int SIZE = 32 * LANE_BYTES;
  static_assert(STAGE <= 2 * LANE_BYTES, "two lanes copy a stage");

  const unsigned char* begin;  // of the row's first piece
  int skew, size;              // bytes before its first group, and to the end of its last one

  static DEVICE int first_group(int unit) { return unit * Format::UNIT / GROUP; }
  static DEVICE int skew_of(int row, int columns, int unit) {
    const int groups = Format::padded(columns) / GROUP;
    return ALIGNED >= 4 ? 0 : ((row * groups + first_group(unit)) * BYTES) & 3;
  }
  DEVICE void aim(const void* values, int row, int columns, int first, int end) {
    const int groups = Format::padded(columns) / GROUP;
    skew = skew_of(row, columns, first);
    begin =
        (const unsigned char*)values + (size_t(row) * groups + first_group(first)) * BYTES - skew;
    size = skew + ((end * Format::UNIT + GROUP - 1) / GROUP - first_group(first)) * BYTES;
  }
  DEVICE void copy(unsigned char* to, int stage, int lane) const {
    JAXLLM_UNROLL
    for (int i = 0; i < LANE_BYTES / PIECE; i++) {
      const int piece = (lane % 2 + 2 * i) * PIECE, at = ((skew + stage * STAGE) & -PIECE) + piece;
      if (at < size) copy_async<PIECE>(to + lane / 2 * (2 * LANE_BYTES) + piece, begin + at);
    }
  }
  // Where a row's value for a span is, from the start of a stage's values.
  static DEVICE int find(int row, int skew, int stage, int first, int unit, int span) {
    const int group = SEVERAL ? (unit * Format::UNIT + span * Format::SPAN) / GROUP : first & unit;
    return row * 2 * LANE_BYTES + ((skew + stage * STAGE) & (PIECE - 1)) + group * BYTES;
  }
};
template <int BYTES, class Format>
struct GroupValues<BYTES, 0, Format> {  // none
  static constexpr int SIZE = 0;
  static DEVICE int skew_of(int, int, int) { return 0; }
  DEVICE void aim(const void*, int, int, int, int) {}
  DEVICE void copy(unsigned char*, int, int) const {}
  static DEVICE int find(int, int, int, int, int, int) { return 0; }
};

template <class Format>
using Scales = GroupValues<Format::Scale::BYTES, Format::SCALE_GROUP, Format>;
template <class Format>
using Zeros = GroupValues<Format::ZERO_BYTES, Format::ZERO_GROUP, Format>;

// Where a chunk of 16 bytes of a row lies in its 128: lanes that read at once find it in other
// banks. A row's lanes read LANE_BYTES each, and as many rows read at once as fill 128 bytes.
template <class Format>
DEVICE int swizzle(int row, int chunk) {
  constexpr int CHUNKS = Format::LANE_BYTES / 4;  // of a row that are read at once
  return row * 128 + ((chunk ^ CHUNKS * (row % (8 / CHUNKS))) << 4);
}

template <class Format, class Epilogue, int C, int STAGES>
struct Ring {
  static constexpr int ROW_BYTES = 128 * TILE_ROWS;
  static constexpr int STAGE_BYTES = ROW_BYTES + Scales<Format>::SIZE + Zeros<Format>::SIZE;
  const Product& p;
  const Place<Format, C>& place;
  unsigned char* stages;
  int tile, stage, stage_count;     // the next to load
  const unsigned char *low, *high;  // its rows of this lane: low and low + 4, high and high + 4
  int row_bytes;
  Scales<Format> scales;
  Zeros<Format> zeros;

  DEVICE Ring(const Product& p, const Place<Format, C>& place, unsigned char* shared)
      : p(p), place(place), stages(shared + place.warp * (STAGES * STAGE_BYTES)) {
    tile = block_index() / C;
    stage = 0;
    stage_count = (place.end - place.first + 1) / 2;
    row_bytes = Format::bytes(p.columns);
    aim();
  }
  DEVICE WeightRow row_of(int r, int half) const {
    return Epilogue::row(p, tile * C + place.tile, r, half);
  }
  DEVICE const unsigned char* find_row(WeightRow at) const {
    return (const unsigned char*)pick(p.weight, at.weight) + size_t(at.row) * row_bytes +
           place.first * UNIT_BYTES;
  }
  DEVICE void aim() {
    low = find_row(row_of(place.lane / 8, 0));
    high = find_row(row_of(place.lane / 8, 1));
    const WeightRow at = row_of(place.lane / 2 % 8, place.lane / 16);
    scales.aim(pick(p.scale, at.weight), at.row, p.columns, place.first, place.end);
    zeros.aim(pick(p.zero, at.weight), at.row, p.columns, place.first, place.end);
  }
  // Begin to copy the next stage.
  DEVICE void load(int slot) {
    if (tile * C < Epilogue::tile_count(p)) {
      unsigned char* to = stages + slot * STAGE_BYTES;
      const int chunk = place.lane % 8, unit = place.first + 2 * stage + chunk / 4;
      if (unit < place.end) {
        const int offset = stage * 128 + chunk * 16;
        const int left = row_bytes - place.first * UNIT_BYTES - offset;
        const int size = Format::WHOLE_UNITS || left > 0 ? 16 : 0;
        JAXLLM_UNROLL
        for (int i = 0; i < 2; i++) {
          const int row = place.lane / 8 + 4 * i;
          unsigned char* at = to + swizzle<Format>(row, chunk);
          copy_async_16(at, low + 4 * i * size_t(row_bytes) + offset, size);
          copy_async_16(at + ROW_BYTES / 2, high + 4 * i * size_t(row_bytes) + offset, size);
        }
      }
      scales.copy(to + ROW_BYTES, stage, place.lane);
      zeros.copy(to + ROW_BYTES + Scales<Format>::SIZE, stage, place.lane);
      if (++stage == stage_count) next_tile();
    }
    end_copy_group();
  }
  DEVICE void next_tile() {
    stage = 0;
    tile += block_count() / C;
    if (tile * C < Epilogue::tile_count(p)) aim();
  }
  DEVICE void fill() {
    JAXLLM_UNROLL
    for (int slot = 0; slot < STAGES; slot++) load(slot);
  }
};

}  // namespace jaxllm
