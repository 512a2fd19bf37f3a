// XLA's buffers as the kernels' structures. Every buffer is checked against all the others, so that
// kernels read within bounds whatever the buffers hold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxllm {

namespace ffi = xla::ffi;
using Type = ffi::DataType;

inline ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("jaxllm: " + what); }

constexpr int64_t kAny = -1;

// Whether a buffer has this type and this shape.
inline bool is(const ffi::AnyBuffer& buffer, Type type, std::initializer_list<int64_t> shape) {
  const auto size = buffer.dimensions();
  if (buffer.element_type() != type || size.size() != shape.size()) return false;
  size_t axis = 0;
  for (int64_t wanted : shape)
    if (const int64_t n = size[axis++]; wanted != kAny && wanted != n) return false;
  return true;
}

// Bytes of an element; 0 for those of less than a byte, which XLA may pack.
inline int64_t element_bytes(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case Type::S1:
    case Type::S2:
    case Type::S4:
    case Type::U1:
    case Type::U2:
    case Type::U4:
    case Type::F4E2M1FN: return 0;
    default: return int64_t(ffi::ByteWidth(buffer.element_type()));
  }
}

template <class T>
const T* data_of(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Arguments `begin <= i < end`.
inline ffi::ErrorOr<std::vector<ffi::AnyBuffer>> pieces_of(const ffi::RemainingArgs& args, size_t begin, size_t end) {
  std::vector<ffi::AnyBuffer> all;
  if (end > args.size()) return ffi::Unexpected(wrong("more pieces are announced than there are"));
  for (size_t i = begin; i < end; i++) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return ffi::Unexpected(buffer.error());
    all.push_back(buffer.value());
  }
  return all;
}

// The element type of a kind that is one array of floats or int8; INVALID for other kinds.
inline Type type_of(Kind kind) {
  switch (kind) {
    case Kind::kF32: return Type::F32;
    case Kind::kBF16: return Type::BF16;
    case Kind::kF16: return Type::F16;
    case Kind::kInt8: return Type::S8;
    default: return Type::INVALID;
  }
}

inline int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// A sparse weight: bits [rows, columns padded to 128 / 8], numbers, for bitmaps where each row's begin, and for
// integers the rows' scales.
inline ffi::ErrorOr<Weight> sparse_of(Weight w, const std::vector<ffi::AnyBuffer>& piece) {
  const int64_t width = whole(w.columns, 128);
  const bool bitmap = w.kind >= Kind::kBitmapF32;
  const Kind kinds[] = {Kind::kF32, Kind::kBF16, Kind::kInt8};
  const Kind kind = kinds[(int32_t(w.kind) - int32_t(Kind::kSparse24F32)) % 3];
  const size_t count = 2 + bitmap + (kind == Kind::kInt8);
  if (piece.size() != count || !is(piece[0], Type::U8, {w.rows, width / 8}))
    return ffi::Unexpected(wrong("the pieces of sparse weights do not fit each other"));
  const bool numbers = bitmap ? is(piece[1], type_of(kind), {kAny}) && piece[1].dimensions()[0] >= kSpare &&
                                    is(piece[2], Type::S32, {w.rows + 1})
                              : is(piece[1], type_of(kind), {w.rows, width / 2});
  if (!numbers || (kind == Kind::kInt8 && !is(piece[count - 1], Type::F32, {w.rows, 1})))
    return ffi::Unexpected(wrong("the numbers of sparse weights do not fit their bits"));
  w.mask = data_of<uint8_t>(piece[0]);
  w.mask_stride = width / 8;
  w.data = data_of<uint8_t>(piece[1]);
  w.stride = width / 2 * element_bytes(piece[1]);
  if (bitmap) {
    w.begin = data_of<int32_t>(piece[2]);
    w.values = piece[1].dimensions()[0];
    w.stride = w.rows ? w.values * element_bytes(piece[1]) / w.rows : 0;
  }
  if (kind == Kind::kInt8) {
    w.group = width;
    w.groups = 1;
    w.scale = piece[count - 1].untyped_data();
  }
  return w;
}

// Integers in GGUF's blocks (kernels.h): bytes [rows * bytes of a row], preceded by less than a row of others. So the
// bytes of a file may begin where XLA needs them to, before the weight does.
inline ffi::ErrorOr<Weight> blocks_of(Weight w, const ffi::AnyBuffer& bytes, int64_t group) {
  switch (w.kind) {
    case Kind::kInt4: w.stride = whole(w.columns, 128) / 32 * 18; break;
    case Kind::kInt8: w.stride = whole(w.columns, 128) / 32 * 34; break;
    case Kind::kQ4K: w.stride = whole(w.columns, 256) / 256 * 144; break;
    case Kind::kQ5K: w.stride = whole(w.columns, 256) / 256 * 176; break;
    default: w.stride = whole(w.columns, 256) / 256 * 210;
  }
  if (group != 32 || w.columns <= 0 || !is(bytes, Type::U8, {kAny}))
    return ffi::Unexpected(wrong("blocks are bytes, for groups of 32 columns"));
  w.rows = bytes.dimensions()[0] / w.stride;
  w.data = data_of<uint8_t>(bytes) + bytes.dimensions()[0] % w.stride;
  w.group = 32;
  w.groups = whole(w.columns, 128) / 32;
  w.blocks = w.kind <= Kind::kInt4;
  return w;
}

// The weight of these arrays; `group` 0: one scale per row.
inline ffi::ErrorOr<Weight> weight_of(const std::vector<ffi::AnyBuffer>& piece, int32_t kind, int64_t group,
                                      int64_t columns) {
  Weight w = {};
  w.kind = static_cast<Kind>(kind);
  w.columns = columns;
  const bool ints = w.kind == Kind::kInt8 || w.kind == Kind::kInt4;
  if ((ints || w.kind >= Kind::kQ4K) && piece.size() == 1) return blocks_of(w, piece[0], group);
  if (piece.empty() || piece[0].dimensions().size() != 2 || columns < 0)
    return ffi::Unexpected(wrong("a weight is a matrix"));
  w.rows = piece[0].dimensions()[0];
  w.data = data_of<uint8_t>(piece[0]);
  w.stride = piece[0].dimensions()[1] * element_bytes(piece[0]);
  const bool four = w.kind == Kind::kInt4;
  switch (w.kind) {
    case Kind::kF32:
    case Kind::kBF16:
    case Kind::kF16:
      if (piece.size() != 1 || !is(piece[0], type_of(w.kind), {w.rows, columns}))
        return ffi::Unexpected(wrong("a weight of floats is one array [rows, columns] of its kind"));
      return w;
    case Kind::kInt8:
    case Kind::kInt4: {
      const int64_t width = whole(columns, 128);
      w.group = group ? group : width;
      w.groups = group ? width / group : 1;
      const bool grouped = group == 32 || group == 64 || group == 128;
      const bool scaled = piece.size() >= 2 &&
                          (is(piece[1], Type::F32, {w.rows, w.groups}) || is(piece[1], Type::F16, {w.rows, w.groups}));
      if (!grouped && (four || group)) return ffi::Unexpected(wrong("a group is of 32, 64 or 128 columns"));
      if (!is(piece[0], four ? Type::U8 : Type::S8, {w.rows, four ? width / 2 : width}) || !scaled)
        return ffi::Unexpected(wrong("integers [rows, whole 128 columns] and scales [rows, groups] do not fit"));
      if (piece.size() > 2 && !(four && piece.size() == 3 && is(piece[2], Type::U8, {w.rows, w.groups})))
        return ffi::Unexpected(wrong("zero points are for 4 bits, uint8 [rows, groups]"));
      w.half = piece[1].element_type() == Type::F16;
      w.scale = piece[1].untyped_data();
      if (piece.size() > 2) w.zero = data_of<uint8_t>(piece[2]);
      return w;
    }
    case Kind::kPacked: {
      const bool fits = piece.size() == 6 && is(piece[0], Type::U8, {w.rows, whole(columns, 64)}) &&
                        is(piece[1], Type::U8, {w.rows, whole(columns, 128) / 2}) && is(piece[2], Type::S32, {}) &&
                        is(piece[3], Type::S32, {w.rows + 1}) && is(piece[4], Type::S32, {kAny}) &&
                        is(piece[5], Type::BF16, {piece[4].dimensions()[0]});
      if (!fits) return ffi::Unexpected(wrong("the six pieces of packed bfloat16 do not fit each other"));
      w.nibbles = data_of<uint8_t>(piece[1]);
      w.nibble_stride = piece[1].dimensions()[1];
      w.base = *data_of<int32_t>(piece[2]);
      w.escape_begin = data_of<int32_t>(piece[3]);
      w.escape_column = data_of<int32_t>(piece[4]);
      w.escape_value = data_of<uint16_t>(piece[5]);
      w.escapes = int32_t(piece[4].dimensions()[0]);
      return w;
    }
    case Kind::kNF4: {
      const int64_t blocks = piece[0].dimensions()[0];
      const bool coded = piece.size() > 3;
      if (columns <= 0 || columns % 64 || blocks % (columns / 64))
        return ffi::Unexpected(wrong("rows of nf4 are whole blocks of 64 columns"));
      const bool fits = piece.size() == (coded ? 6u : 3u) && is(piece[0], Type::U8, {blocks, 32}) &&
                        is(piece[1], coded ? Type::U8 : Type::F32, {blocks}) && is(piece[2], Type::F32, {16});
      if (!fits || (coded && !(is(piece[3], Type::F32, {256}) && is(piece[4], Type::F32, {whole(blocks, 256) / 256}) &&
                               is(piece[5], Type::F32, {}))))
        return ffi::Unexpected(wrong("the pieces of nf4 do not fit each other"));
      w.group = 64;
      w.groups = columns / 64;
      w.rows = blocks / w.groups;
      w.stride = columns / 2;
      w.scale = piece[1].untyped_data();
      w.levels = data_of<float>(piece[2]);
      if (coded) {
        w.levels8 = data_of<float>(piece[3]);
        w.factor = data_of<float>(piece[4]);
        w.mean = data_of<float>(piece[5]);
      }
      return w;
    }
    case Kind::kSparse24F32:
    case Kind::kSparse24BF16:
    case Kind::kSparse24Int8:
    case Kind::kBitmapF32:
    case Kind::kBitmapBF16:
    case Kind::kBitmapInt8: return sparse_of(w, piece);
    default: break;
  }
  return ffi::Unexpected(wrong("no weight is of kind " + std::to_string(kind)));
}

// The parts of a cache, which determine the queries' K: for each its k, v and positions, and then the
// two scales if k is int8. Of the first `cached` parts, each row of queries reads the row that `row` [B] says.
inline ffi::ErrorOr<std::vector<Part>> parts_of(const std::vector<ffi::AnyBuffer>& piece, size_t cached,
                                                const int32_t* row, Queries& queries) {
  const int64_t B = queries.B, H = queries.H;
  std::vector<Part> parts;
  for (size_t i = 0; i < piece.size();) {
    if (i + 3 > piece.size() || piece[i].dimensions().size() != 4 || piece[i + 1].dimensions().size() != 4 ||
        piece[i + 2].dimensions().size() != 2)
      return ffi::Unexpected(wrong("a part has k and v [B, S, K, H] and positions [B, S]"));
    const ffi::AnyBuffer &k = piece[i], &v = piece[i + 1], &at = piece[i + 2];
    const int64_t k_rows = k.dimensions()[0], v_rows = v.dimensions()[0], at_rows = at.dimensions()[0];
    const int64_t slots = k.dimensions()[1], K = k.dimensions()[2];
    Part part = {};
    bool known = false;
    for (Kind kind : {Kind::kF32, Kind::kBF16, Kind::kF16, Kind::kInt8})
      if (type_of(kind) == k.element_type()) {
        part.kind = kind;
        known = true;
      }
    part.row = parts.size() < cached ? row : nullptr;
    part.rows = std::max({k_rows, v_rows, at_rows});
    for (int64_t rows : {k_rows, v_rows, at_rows})
      known = known && (rows == 1 || rows == (part.row ? part.rows : B)) && (part.rows || !part.row);
    if (!parts.empty()) known = known && K == queries.K;
    if (!known || !is(v, k.element_type(), {v_rows, slots, K, H}) || k.dimensions()[3] != H ||
        !is(at, Type::S32, {at_rows, slots}))
      return ffi::Unexpected(wrong("the rows, slots, heads or types of queries, keys, values and positions differ"));
    queries.K = K;
    part.slots = slots;
    part.one_k = k_rows == 1;
    part.one_v = v_rows == 1;
    part.one_position = at_rows == 1;
    part.k = k.untyped_data();
    part.v = v.untyped_data();
    part.position = data_of<int32_t>(at);
    i += 3;
    if (part.kind == Kind::kInt8) {
      if (i + 2 > piece.size() || !is(piece[i], Type::F32, {k_rows, slots, K}) ||
          !is(piece[i + 1], Type::F32, {v_rows, slots, K}))
        return ffi::Unexpected(wrong("int8 keys and values have float32 scales [B, S, K]"));
      part.k_scale = data_of<float>(piece[i]);
      part.v_scale = data_of<float>(piece[i + 1]);
      i += 2;
    }
    parts.push_back(part);
  }
  if (!queries.K || queries.N % queries.K)
    return ffi::Unexpected(wrong("the heads of queries are no multiple of the keys'"));
  return parts;
}

}  // namespace jaxllm
