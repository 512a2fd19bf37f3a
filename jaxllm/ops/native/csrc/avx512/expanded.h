// Weight rows written out as bfloat16, for many input rows.

// Some columns of a weight row as bfloat16, 32 to a register.
template <int N>
struct Some {
  __m512i r[N];
};

// Rows that have been expanded before, from row `first` on.
template <int N>
struct ExpandedRows {
  static constexpr int kRegisters = N;
  const uint16_t* data;
  int64_t stride, first;

  Some<N> at(int64_t o, int64_t c, bool) const {
    const uint16_t* p = data + (o - first) * stride + c;
    Some<N> out;
    JAXLLM_UNROLL
    for (int n = 0; n < N; n++) out.r[n] = _mm512_loadu_si512(p + 32 * n);
    return out;
  }
};

// Rows expanded to bfloat16, as many at once as the second cache holds: for more than four input
// rows. `expand(o, out)` writes one, `some(rows, begin, end)` multiplies them.
template <int N, class Expand, class Multiply>
void by_expanded(const Input& in, int64_t begin, int64_t end, const Expand& expand, const Multiply& some) {
  const int64_t stride = up(in.columns, 128) + 32 * 3, most = up((256 << 10) / (2 * stride), 4);
  thread_local std::vector<uint16_t> scratch;
  scratch.resize(most * stride);
  for (int64_t b = begin; b < end; b += most) {
    const int64_t stop = b + most < end ? b + most : end;
    for (int64_t o = b; o < stop; o++) expand(o, scratch.data() + (o - b) * stride);
    some(ExpandedRows<N>{scratch.data(), stride, b}, b, stop);
  }
}
