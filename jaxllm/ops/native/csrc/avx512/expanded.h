// Weight rows written out as plain numbers, for many input rows.

// Rows expanded to T, as many at once as the second cache holds: for more than four input rows.
// `expand(o, out)` writes one, `some(rows, stride, begin, end)` multiplies those that lie `stride`
// numbers apart.
template <class T, class Expand, class Multiply>
void by_expanded(const Input& in, int64_t begin, int64_t end, const Expand& expand, const Multiply& some) {
  const int64_t stride = up(in.columns, 128) + 32 * 3, most = rows_in_cache(sizeof(T) * stride);
  thread_local std::vector<T> scratch;
  scratch.resize(most * stride);
  for (int64_t b = begin; b < end; b += most) {
    const int64_t stop = b + most < end ? b + most : end;
    for (int64_t o = b; o < stop; o++) expand(o, scratch.data() + (o - b) * stride);
    some(scratch.data(), stride, b, stop);
  }
}

// The weight whose rows from `first` on are these.
Weight plain_rows(const Weight& w, Kind kind, const void* rows, int64_t stride, int64_t first, int64_t columns) {
  Weight plain = w;
  plain.kind = kind;
  plain.columns = columns;
  plain.stride = stride;
  plain.data = static_cast<const uint8_t*>(rows) - first * stride;
  return plain;
}
