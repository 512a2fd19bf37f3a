// XLA's buffers as the kernels' arguments. Shapes are checked against each other, so that kernels read within bounds.
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
using ffi::AnyBuffer;
using ffi::Error;
using Type = ffi::DataType;

inline Error invalid_argument(const std::string& what) { return Error::InvalidArgument("jaxllm: " + what); }

inline auto unexpected(const std::string& what) { return ffi::Unexpected(invalid_argument(what)); }

constexpr int64_t kAny = -1;

// Whether a buffer has this type and this shape.
inline bool is(const AnyBuffer& buffer, Type type, std::initializer_list<int64_t> shape) {
  const auto size = buffer.dimensions();
  if (buffer.element_type() != type || size.size() != shape.size()) return false;
  size_t axis = 0;
  for (int64_t expected : shape)
    if (const int64_t n = size[axis++]; expected != kAny && expected != n) return false;
  return true;
}

// Bytes of an element; 0 for those of less than a byte, which XLA may pack.
inline int64_t element_bytes(const AnyBuffer& buffer) {
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
const T* data_as(const AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

// Arguments `begin <= i < end`.
inline ffi::ErrorOr<std::vector<AnyBuffer>> get_buffers(const ffi::RemainingArgs& args, size_t begin, size_t end) {
  std::vector<AnyBuffer> all;
  if (end > args.size()) return unexpected("more pieces are announced than there are");
  for (size_t i = begin; i < end; i++) {
    const auto buffer = args.get<AnyBuffer>(i);
    if (!buffer.has_value()) return ffi::Unexpected(buffer.error());
    all.push_back(buffer.value());
  }
  return all;
}

// The element type of a kind that is one array of floats or int8; INVALID for other kinds.
inline Type data_type(Kind kind) {
  switch (kind) {
    case Kind::kF32: return Type::F32;
    case Kind::kBF16: return Type::BF16;
    case Kind::kF16: return Type::F16;
    case Kind::kInt8: return Type::S8;
    default: return Type::INVALID;
  }
}

// A sparse weight: bits [rows, columns padded to 128 / 8], numbers, for bitmaps where each row's begin, and for
// integers the rows' scales.
inline ffi::ErrorOr<Weight> parse_sparse(Weight w, const std::vector<AnyBuffer>& buffers) {
  const int64_t width = round_up(w.columns, 128);
  const bool bitmap = w.kind >= Kind::kBitmapF32;
  const Kind kinds[] = {Kind::kF32, Kind::kBF16, Kind::kInt8};
  const Kind kind = kinds[(int32_t(w.kind) - int32_t(Kind::kSparse24F32)) % 3];
  const size_t count = 2 + bitmap + (kind == Kind::kInt8);
  if (buffers.size() != count || !is(buffers[0], Type::U8, {w.rows, width / 8}))
    return unexpected("the pieces of sparse weights do not fit each other");
  const bool numbers = bitmap
                           ? is(buffers[1], data_type(kind), {kAny}) && buffers[1].dimensions()[0] >= kBitmapPadding &&
                                 is(buffers[2], Type::S32, {w.rows + 1})
                           : is(buffers[1], data_type(kind), {w.rows, width / 2});
  if (!numbers || (kind == Kind::kInt8 && !is(buffers[count - 1], Type::F32, {w.rows, 1})))
    return unexpected("the numbers of sparse weights do not fit their bits");
  w.mask = data_as<uint8_t>(buffers[0]);
  w.mask_stride = width / 8;
  w.data = data_as<uint8_t>(buffers[1]);
  w.stride = width / 2 * element_bytes(buffers[1]);
  if (bitmap) {
    w.begin = data_as<int32_t>(buffers[2]);
    w.values = buffers[1].dimensions()[0];
    w.stride = w.rows ? w.values * element_bytes(buffers[1]) / w.rows : 0;
  }
  if (kind == Kind::kInt8) {
    w.group = width;
    w.groups = 1;
    w.scale = buffers[count - 1].untyped_data();
  }
  return w;
}

// GGUF's blocks: bytes [rows * bytes of a row], preceded by less than a row of other bytes, so that XLA's alignment can
// hold for bytes of a file before the weight.
inline ffi::ErrorOr<Weight> parse_blocks(Weight w, const AnyBuffer& bytes, int64_t group) {
  switch (w.kind) {
    case Kind::kInt4: w.stride = round_up(w.columns, 128) / 32 * 18; break;
    case Kind::kInt8: w.stride = round_up(w.columns, 128) / 32 * 34; break;
    case Kind::kQ4K: w.stride = round_up(w.columns, 256) / 256 * 144; break;
    case Kind::kQ5K: w.stride = round_up(w.columns, 256) / 256 * 176; break;
    default: w.stride = round_up(w.columns, 256) / 256 * 210;
  }
  if (group != 32 || w.columns <= 0 || !is(bytes, Type::U8, {kAny}))
    return unexpected("blocks are bytes, for groups of 32 columns");
  w.rows = bytes.dimensions()[0] / w.stride;
  w.data = data_as<uint8_t>(bytes) + bytes.dimensions()[0] % w.stride;
  w.group = 32;
  w.groups = round_up(w.columns, 128) / 32;
  w.blocks = w.kind <= Kind::kInt4;
  return w;
}

// The weight of these arrays; `group` 0: one scale per row.
inline ffi::ErrorOr<Weight> parse_weight(const std::vector<AnyBuffer>& buffers, int32_t kind, int64_t group,
                                         int64_t columns) {
  Weight w = {};
  w.e2m1 = kind == int32_t(Kind::kMXFP4);
  w.kind = w.e2m1 ? Kind::kInt4 : static_cast<Kind>(kind);
  w.columns = columns;
  const bool ints = w.kind == Kind::kInt8 || w.kind == Kind::kInt4;
  if ((ints || w.kind >= Kind::kQ4K) && buffers.size() == 1 && !w.e2m1) return parse_blocks(w, buffers[0], group);
  if (buffers.empty() || buffers[0].dimensions().size() != 2 || columns < 0) return unexpected("a weight is a matrix");
  w.rows = buffers[0].dimensions()[0];
  w.data = data_as<uint8_t>(buffers[0]);
  w.stride = buffers[0].dimensions()[1] * element_bytes(buffers[0]);
  const bool is_int4 = w.kind == Kind::kInt4;
  switch (w.kind) {
    case Kind::kF32:
    case Kind::kBF16:
    case Kind::kF16:
      if (buffers.size() != 1 || !is(buffers[0], data_type(w.kind), {w.rows, columns}))
        return unexpected("a weight of floats is one array [rows, columns] of its kind");
      return w;
    case Kind::kInt8:
    case Kind::kInt4: {
      const int64_t width = round_up(columns, 128);
      w.group = group ? group : width;
      w.groups = group ? width / group : 1;
      const bool grouped = group == 32 || group == 64 || group == 128;
      const auto scales_are = [&](Type type) {
        return buffers.size() >= 2 && is(buffers[1], type, {w.rows, w.groups});
      };
      const bool scaled = w.e2m1 ? scales_are(Type::U8) && group == 32 && buffers.size() == 2
                                 : scales_are(Type::F32) || scales_are(Type::F16);
      if (!grouped && (is_int4 || group)) return unexpected("a group is of 32, 64 or 128 columns");
      if (!is(buffers[0], is_int4 ? Type::U8 : Type::S8, {w.rows, is_int4 ? width / 2 : width}) || !scaled)
        return ffi::Unexpected(
            invalid_argument("integers [rows, whole 128 columns] and scales [rows, groups] do not fit"));
      if (buffers.size() > 2 && !(is_int4 && buffers.size() == 3 && is(buffers[2], Type::U8, {w.rows, w.groups})))
        return unexpected("zero points are for 4 bits, uint8 [rows, groups]");
      w.half = buffers[1].element_type() == Type::F16;
      w.scale = buffers[1].untyped_data();
      if (buffers.size() > 2) w.zero = data_as<uint8_t>(buffers[2]);
      return w;
    }
    case Kind::kPackedBF16: {
      const bool valid = buffers.size() == 6 && is(buffers[0], Type::U8, {w.rows, round_up(columns, 64)}) &&
                         is(buffers[1], Type::U8, {w.rows, round_up(columns, 128) / 2}) &&
                         is(buffers[2], Type::S32, {}) && is(buffers[3], Type::S32, {w.rows + 1}) &&
                         is(buffers[4], Type::S32, {kAny}) && is(buffers[5], Type::BF16, {buffers[4].dimensions()[0]});
      if (!valid) return unexpected("the six pieces of packed bfloat16 do not fit each other");
      w.nibbles = data_as<uint8_t>(buffers[1]);
      w.nibble_stride = buffers[1].dimensions()[1];
      w.base = *data_as<int32_t>(buffers[2]);
      w.escape_begin = data_as<int32_t>(buffers[3]);
      w.escape_column = data_as<int32_t>(buffers[4]);
      w.escape_value = data_as<uint16_t>(buffers[5]);
      w.escapes = int32_t(buffers[4].dimensions()[0]);
      return w;
    }
    case Kind::kNF4: {
      const int64_t blocks = buffers[0].dimensions()[0];
      const bool nested = buffers.size() > 3;
      if (columns <= 0 || columns % 64 || blocks % (columns / 64))
        return unexpected("rows of nf4 are whole blocks of 64 columns");
      const bool valid = buffers.size() == (nested ? 6u : 3u) && is(buffers[0], Type::U8, {blocks, 32}) &&
                         is(buffers[1], nested ? Type::U8 : Type::F32, {blocks}) && is(buffers[2], Type::F32, {16});
      if (!valid ||
          (nested && !(is(buffers[3], Type::F32, {256}) && is(buffers[4], Type::F32, {round_up(blocks, 256) / 256}) &&
                       is(buffers[5], Type::F32, {}))))
        return unexpected("the pieces of nf4 do not fit each other");
      w.group = 64;
      w.groups = columns / 64;
      w.rows = blocks / w.groups;
      w.stride = columns / 2;
      w.scale = buffers[1].untyped_data();
      w.codebook = data_as<float>(buffers[2]);
      if (nested) {
        w.scale_codebook = data_as<float>(buffers[3]);
        w.factor = data_as<float>(buffers[4]);
        w.mean = data_as<float>(buffers[5]);
      }
      return w;
    }
    case Kind::kSparse24F32:
    case Kind::kSparse24BF16:
    case Kind::kSparse24Int8:
    case Kind::kBitmapF32:
    case Kind::kBitmapBF16:
    case Kind::kBitmapInt8: return parse_sparse(w, buffers);
    default: break;
  }
  return unexpected("no weight is of kind " + std::to_string(kind));
}

// The parts of a cache: k, v and positions of each, and two scales if k is int8. Sets K of the queries. Of the first
// `cached` parts, each row of queries reads the row given in `row` [B].
inline ffi::ErrorOr<std::vector<CachePart>> parse_cache(const std::vector<AnyBuffer>& buffers, size_t cached,
                                                        const int32_t* row, int64_t rows_each, Queries& queries) {
  const int64_t B = queries.B, H = queries.H;
  std::vector<CachePart> parts;
  for (size_t i = 0; i < buffers.size();) {
    if (i + 3 > buffers.size() || buffers[i].dimensions().size() != 4 || buffers[i + 1].dimensions().size() != 4 ||
        buffers[i + 2].dimensions().size() != 2)
      return unexpected("a part has k and v [B, S, K, H] and positions [B, S]");
    const AnyBuffer &k = buffers[i], &v = buffers[i + 1], &at = buffers[i + 2];
    const int64_t k_rows = k.dimensions()[0], v_rows = v.dimensions()[0], at_rows = at.dimensions()[0];
    const int64_t slots = k.dimensions()[1], K = k.dimensions()[2];
    CachePart part = {};
    bool valid = false;
    for (Kind kind : {Kind::kF32, Kind::kBF16, Kind::kF16, Kind::kInt8})
      if (data_type(kind) == k.element_type()) {
        part.kind = kind;
        valid = true;
      }
    part.row = parts.size() < cached ? row : nullptr;
    part.rows_each = rows_each;
    part.rows = std::max({k_rows, v_rows, at_rows});
    for (int64_t rows : {k_rows, v_rows, at_rows})
      valid = valid && (rows == 1 || rows == (part.row ? part.rows : B)) && (part.rows || !part.row);
    if (!parts.empty()) valid = valid && K == queries.K;
    if (!valid || !is(v, k.element_type(), {v_rows, slots, K, H}) || k.dimensions()[3] != H ||
        !is(at, Type::S32, {at_rows, slots}))
      return ffi::Unexpected(
          invalid_argument("the rows, slots, heads or types of queries, keys, values and positions differ"));
    queries.K = K;
    part.slots = slots;
    part.shared_k = k_rows == 1;
    part.shared_v = v_rows == 1;
    part.shared_position = at_rows == 1;
    part.k = k.untyped_data();
    part.v = v.untyped_data();
    part.position = data_as<int32_t>(at);
    i += 3;
    if (part.kind == Kind::kInt8) {
      if (i + 2 > buffers.size() || !is(buffers[i], Type::F32, {k_rows, slots, K}) ||
          !is(buffers[i + 1], Type::F32, {v_rows, slots, K}))
        return unexpected("int8 keys and values have float32 scales [B, S, K]");
      part.k_scale = data_as<float>(buffers[i]);
      part.v_scale = data_as<float>(buffers[i + 1]);
      i += 2;
    }
    parts.push_back(part);
  }
  if (!queries.K || queries.N % queries.K) return unexpected("the heads of queries are no multiple of the keys'");
  return parts;
}

}  // namespace jaxllm
