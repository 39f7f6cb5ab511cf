// Loops over the rows of tensors, in parallel, and sums over them, the same bits for any number of threads.
#pragma once

#include "tensors.h"

namespace tensors {

// As rows of one element where tiles need not end with a row.
inline Rows elements(const Tensor& t) {
  if (!t.is_contiguous()) return rows(t);
  return {t, t.const_data_ptr(), t.numel(), 1, 1};
}

// The sum over n rows as a tensor [w] of `dtype`; `loop(begin, end, sums)` adds its rows' to `sums`, of type A. Chunks of
// rows run in parallel. Each is summed in blocks of rows, and those in double, so that errors do not grow with their number.
template <class A, class F>
Tensor sum_of_rows(int64_t n, int64_t w, int64_t block, ScalarType dtype, const F& loop) {
  const ScalarType arithmetic = sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float;
  const int64_t chunk = chunk_rows(n, w), chunks = std::max<int64_t>(1, (n + chunk - 1) / chunk);
  const int64_t sizes[2] = {chunks, w};
  Tensor totals = empty(sizes, 2, ScalarType::Double), parts = empty(sizes, 2, arithmetic), out = empty(&w, 1, arithmetic);
  double* total = static_cast<double*>(totals.mutable_data_ptr());
  A* part = static_cast<A*>(parts.mutable_data_ptr());
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      double* sum = total + c * w;
      A* of_block = part + c * w;
      std::fill(sum, sum + w, 0);
      const int64_t last = std::min(n, (c + 1) * chunk);
      for (int64_t r = c * chunk; r < last; r += block) {
        std::fill(of_block, of_block + w, A(0));
        loop(r, std::min(r + block, last), of_block);
        for (int64_t i = 0; i < w; ++i) sum[i] += of_block[i];
      }
    }
  });
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t i = 0; i < w; ++i) total[i] += total[c * w + i];
  A* result = static_cast<A*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < w; ++i) result[i] = A(total[i]);
  if (dtype == arithmetic) return out;
  Tensor cast = empty(&w, 1, dtype);
  torch::stable::copy_(cast, out);
  return cast;
}
template <class F>
Tensor sum_of_rows(int64_t n, int64_t w, int64_t block, ScalarType arithmetic, ScalarType dtype, const F& loop) {
  return arithmetic == ScalarType::Double ? sum_of_rows<double>(n, w, block, dtype, loop)
                                          : sum_of_rows<float>(n, w, block, dtype, loop);
}

// Runs `loop(begin, end)` over n rows; in this thread where starting others costs more than it brings.
template <class F>
void for_rows(int64_t n, int64_t w, const F& loop) {
  const int64_t grain = row_grain(w);
  if (n <= grain) {
    if (n > 0) loop(0, n);
  } else {
    torch::stable::parallel_for(0, n, grain, loop);
  }
}

}  // namespace tensors
