// GGUF's blocks of 256 columns (ggml's Q4_K, Q5_K, Q6_K) as the arrays of a weight that has kernels.
#include <cstdint>
#include <cstring>

namespace {

float from_half(const uint8_t* p) {
  const uint32_t bits = p[0] | uint32_t(p[1]) << 8, size = bits & 0x7fff;
  const uint32_t wide = (size << 13) + ((size < 0x7c00 ? 112u : 224u) << 23);  // 224: infinity, NaN
  float value;
  std::memcpy(&value, &wide, 4);
  if (size < 0x400) value = float(size) * 0x1p-24f;
  return bits & 0x8000 ? -value : value;
}

// The 4-bit codes of run r, of eight: 32 bytes are two runs.
uint8_t nibble(const uint8_t* codes, int r, int i) { return codes[r / 2 * 32 + i] >> r % 2 * 4 & 15; }

// Scales and offsets of the eight runs of Q4_K and Q5_K: 6 bits each, of which the last four runs have the upper two in
// the bytes of the first four.
void unpack_runs(const uint8_t* block, float* scale, float* offset) {
  const uint8_t* six = block + 4;
  for (int r = 0; r < 8 && scale; r++)
    scale[r] = float(r < 4 ? six[r] & 63 : (six[r + 4] & 15) | six[r - 4] >> 6 << 4) * from_half(block);
  for (int r = 0; r < 8 && offset; r++)
    offset[r] = -(float(r < 4 ? six[r + 4] & 63 : six[r + 4] >> 4 | six[r] >> 6 << 4) * from_half(block + 2));
}

void unpack_q4(const uint8_t* block, uint8_t* codes, float* scale, float* offset) {
  for (int r = 0; r < 8 && codes; r++)  // two of 16 columns a byte
    for (int i = 0; i < 16; i++)
      codes[16 * r + i] = uint8_t(nibble(block + 16, r, i) | nibble(block + 16, r, i + 16) << 4);
  unpack_runs(block, scale, offset);
}

void unpack_q5(const uint8_t* block, uint8_t* codes, float* scale, float* offset) {
  for (int r = 0; r < 8 && codes; r++)
    for (int i = 0; i < 32; i++) codes[32 * r + i] = uint8_t(nibble(block + 48, r, i) | (block[16 + i] >> r & 1) << 4);
  unpack_runs(block, scale, offset);
}

// Sixteen scales, of which `first` gets every other one.
void unpack_q6(const uint8_t* block, uint8_t* codes, float* first, float* second) {
  for (int r = 0; r < 8 && codes; r++) {  // by halves: 64 bytes of low bits, 32 of high ones
    const uint8_t *low = block + r / 4 * 64 + r % 2 * 32, *high = block + 128 + r / 4 * 32;
    for (int i = 0; i < 32; i++)
      codes[32 * r + i] = uint8_t((low[i] >> r % 4 / 2 * 4 & 15) + (high[i] >> r % 4 * 2 & 3) * 16 - 32);
  }
  for (int j = 0; j < 16; j++)
    if (float* to = j % 2 ? second : first) to[j / 2] = float(int8_t(block[192 + j])) * from_half(block + 208);
}

}  // namespace

// Unpacks `count` blocks with 4, 5 or 6 bits; arrays that are null are left out.
extern "C" void jaxllm_unpack(int32_t bits, const uint8_t* block, int64_t count, uint8_t* codes, float* first,
                              float* second) {
  const auto unpack = bits == 4 ? unpack_q4 : (bits == 5 ? unpack_q5 : unpack_q6);
  const int64_t bytes = bits == 4 ? 144 : (bits == 5 ? 176 : 210);
  for (int64_t i = 0; i < count; i++, block += bytes) {
    unpack(block, codes, first, second);
    if (codes) codes += bits == 4 ? 128 : 256;
    if (first) first += 8;
    if (second) second += 8;
  }
}
