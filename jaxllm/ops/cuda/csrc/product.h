// Products x W^T for decoding: 1 to 64 rows of x, and weights as rows in any format.
//
// The columns are cut into 8 contiguous parts. A warp adds up one part of 16 rows of the weight,
// from zero, in the order of the columns, and the 8 sums are added in the order of the parts. So
// an output's bits depend neither on other rows nor on C, TILES, STAGES or the grid.
//
// C blocks of a cluster share the columns: each holds its share of x in shared memory and walks
// over tiles of 16 C rows. Their sums go to the block that ends a tile, which does so while the
// next one is added up. TILES is the number of tiles of 8 rows of x.
#pragma once

#include "epilogues.h"
#include "part_sums.h"

namespace jaxllm {

// Where things are in a block's shared memory. launch.py adds up the same bytes.
template <class Format, class Epilogue, int C, int TILES, int STAGES>
struct Layout {
  static constexpr int SUMS = PARTS * STAGES * Ring<Format, Epilogue, C, STAGES>::STAGE_BYTES;
  static constexpr int SUM_FLOATS = TILES * 128;  // of a part: [TILES][32 lanes][4]
  static constexpr int SQUARES = SUMS + 2 * PARTS * SUM_FLOATS * 4;
  static constexpr int INPUTS = SQUARES + PARTS * TILES * 8 * 4;
  // Two or eight rows of x are read at once, 64 or 16 bytes of each bank's 128.
  static DEVICE int input_stride(int columns) {
    const int steps = (Format::units(columns) / Format::STEP + C - 1) / C;  // at most
    return (steps * Format::STEP * Format::UNIT * 2 + 127) / 128 * 128 +
           (Format::SPAN == 32 ? 64 : 16);
  }
  static DEVICE int bytes(int rows, int columns) { return INPUTS + rows * input_stride(columns); }
};

// The end of a tile: a warp adds the 8 parts of 8 rows of x and writes the outputs.
template <class Format, class Prologue, class Epilogue, int C, int TILES>
struct Finisher {
  const Product& p;
  const Place<Format, C>& place;
  const float* sums;  // [2 buffers][8 parts][TILES][32 lanes][4]
  const float* squares;
  int rows;  // of x, the first of the 8 of this warp
  struct Ahead {
    int tile = -1;  // none
    Two scale = {1, 1}, read[2] = {};
  };

  DEVICE Finisher(const Product& p, const Place<Format, C>& place, const float* sums,
                  const float* squares)
      : p(p), place(place), sums(sums), squares(squares) {
    rows = C == 1 && TILES == 1 ? 0 : 8 * place.warp;
  }
  DEVICE WeightRow row(int tile, int half) const {
    return Epilogue::row(p, tile, place.lane / 4, half);
  }
  DEVICE int input_row(int e) const { return rows + place.lane % 4 * 2 + e; }
  // Read what the end of a tile needs from memory.
  DEVICE Ahead read_ahead(int tile) const {
    Ahead ahead;
    ahead.tile = tile * C + place.rank;
    if (rows >= 8 * TILES) return ahead;
    const WeightRow low = row(ahead.tile, 0), high = row(ahead.tile, 1);
    if constexpr (Format::ROW_SCALE) {
      using Scale = typename Format::Scale;
      const char* scale = (const char*)pick(p.scale, low.weight);
      ahead.scale.low = INTEGER_SCALE * Scale::read(scale + low.row * Scale::BYTES);
      scale = (const char*)pick(p.scale, high.weight);
      ahead.scale.high = INTEGER_SCALE * Scale::read(scale + high.row * Scale::BYTES);
    }
    if constexpr (Format::HAS_ESCAPES) {
      prefetch_global(find_escapes(low));
      prefetch_global(find_escapes(high));
    }
    JAXLLM_UNROLL
    for (int e = 0; e < 2; e++)
      if (input_row(e) < p.rows) ahead.read[e] = Epilogue::read_ahead(p, input_row(e), low, high);
    return ahead;
  }
  // Where the escapes of a row of the weight begin, and then those of the next.
  DEVICE const int* find_escapes(WeightRow at) const {
    return (const int*)pick(p.scale, at.weight) + 1 + at.row;
  }
  // What a row of the weight lacks in what it has been multiplied by.
  DEVICE float sum_escapes(int m, WeightRow at) const {
    const int* const begin = find_escapes(at);
    const uint2* const escapes = (const uint2*)(begin + 1 + pick(p.outputs, at.weight) - at.row);
    const int end = read_global(begin + 1);
    float sum = 0;
    for (int i = read_global(begin); i < end; i++) {
      const uint2 escape = read_global(escapes + i);
      const float lacks = high_float(escape.y) - low_float(escape.y);
      sum = fmaf(lacks, Prologue::read(p, m, escape.x), sum);
    }
    return sum;
  }
  DEVICE void finish(const Ahead& ahead, int buffer) const {
    if (rows >= 8 * TILES) return;
    const float* at = sums + (buffer * PARTS * TILES + rows / 8) * 128 + place.lane * 4;
    float sum[4] = {};
    JAXLLM_UNROLL
    for (int part = 0; part < PARTS; part++) {
      const float4 more = *(const float4*)(at + part * TILES * 128);
      sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
    }
    const WeightRow low = row(ahead.tile, 0), high = row(ahead.tile, 1);
    JAXLLM_UNROLL
    for (int e = 0; e < 2; e++) {
      const int m = input_row(e);
      if (m >= p.rows) continue;
      const float factor = Prologue::template factor<TILES>(p, squares, m);
      Two scaled = {sum[e] * ahead.scale.low, sum[2 + e] * ahead.scale.high};
      if constexpr (Format::HAS_ESCAPES)
        scaled = {scaled.low + sum_escapes(m, low), scaled.high + sum_escapes(m, high)};
      scaled = {scaled.low * factor, scaled.high * factor};
      Epilogue::write(p, m, low, high, scaled, ahead.read[e]);
    }
  }
};

// The whole kernel. EARLY: no kernel that may still run has written the weights, so that they are
// read before the wait for it. The next kernel may start at once: it waits in its turn.
template <class Format, class Prologue, class Epilogue, int C, int TILES, int STAGES, bool EARLY>
DEVICE void run(const Product& p) {
  using Memory = Layout<Format, Epilogue, C, TILES, STAGES>;
  unsigned char* const shared = shared_memory();
  float* const sums = (float*)(shared + Memory::SUMS);
  const Inputs inputs = {shared + Memory::INPUTS, Memory::input_stride(p.columns),
                         (float*)(shared + Memory::SQUARES)};
  const Place<Format, C> place(p.columns);
  let_next_kernel_start();
  if constexpr (C > 1) arrive_in_cluster();
  if constexpr (!EARLY) wait_for_previous_kernel();
  Ring<Format, Epilogue, C, STAGES> ring(p, place, shared);
  ring.fill();
  Prologue::prefetch(p, place);
  if constexpr (EARLY) wait_for_previous_kernel();
  if constexpr (C > 1) wait_for_cluster();  // its other blocks have started: they can be written to
  Prologue::template load<Format, TILES>(p, place, inputs);
  block_barrier();

  PartSums<Format, C, TILES> part(p, place, inputs);
  Finisher<Format, Prologue, Epilogue, C, TILES> finisher(p, place, sums, inputs.squares);
  using Ahead = typename Finisher<Format, Prologue, Epilogue, C, TILES>::Ahead;
  Ahead now = {}, before = {};
  int slot = 0, buffer = 0, turn = 0;  // of the ring, of sums, and of the warps
  for (int tile = block_index() / C; tile * C < Epilogue::tile_count(p);
       tile += block_count() / C) {
    // A warp ends 8 rows of x; if there are no more and no other block, each warp in its turn.
    const bool ends = C > 1 || TILES > 1 || place.warp == turn % PARTS;
    if (ends) now = finisher.read_ahead(tile);
    const int mine = tile * C + place.tile, g = place.lane / 4;
    part.begin(Epilogue::row(p, mine, g, 0).row, Epilogue::row(p, mine, g, 1).row, p.columns);
    for (int stage = 0; stage < ring.stage_count; stage++) {
      wait_for_copies<STAGES - 1>();
      warp_barrier();  // those of the other lanes have arrived too
      const unsigned char* bytes = ring.stages + slot * ring.STAGE_BYTES;
      part.add_unit(bytes, stage, 0);
      if (place.first + 2 * stage + 1 < place.end) part.add_unit(bytes, stage, 1);
      warp_barrier();  // all lanes have read the stage
      ring.load(slot);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    float* const buffered = sums + buffer * PARTS * Memory::SUM_FLOATS;
    if constexpr (C == 1) {
      part.send(buffered);
      block_barrier();
      if (ends) finisher.finish(now, buffer);
    } else {
      if (before.tile >= 0) {
        wait_for_cluster();
        finisher.finish(before, buffer ^ 1);
      }
      part.send(buffered);
      arrive_in_cluster();
      before = now;
    }
    buffer ^= 1;
    turn++;
  }
  if constexpr (C > 1) {
    wait_for_cluster();
    finisher.finish(before, buffer ^ 1);
  }
}

}  // namespace jaxllm
