// Dropout whose mask is computed again where it is needed, and the residual added to it.
#include "dropout.h"

#include "convert.h"
#include "loops.h"
#include "tiles.h"

namespace FUSIBLE_ISA {

template <class T>
static void loop(const Dropout& d, int64_t begin, int64_t end) {
  using A = wide<T>;
  alignas(64) A x_tile[kTile], residual_tile[kTile], y_tile[kTile];
  alignas(64) uint32_t word_tile[kTile + 2 * philox::kElements];
  const int64_t w = d.width;
  const A scale = A(d.scale);
  const uint32_t threshold = d.threshold;
  const bool dense = d.x_stride == w && (!d.residual || d.residual_stride == w);
  for_tiles(begin, end, w, dense, [&](int64_t r, int64_t c, int64_t n) {
    const A* x = row(static_cast<const T*>(d.x) + r * d.x_stride + c, n, x_tile);
    const uint32_t* word = random_words(d.seed, r * w + c, n, word_tile);
    T* out = static_cast<T*>(d.y) + r * w + c;
    A* y = place(out, y_tile);
    if (d.residual) {
      const A* residual = row(static_cast<const T*>(d.residual) + r * d.residual_stride + c, n, residual_tile);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) y[i] = residual[i] + x[i] * (word[i] < threshold ? A(0) : scale);
    } else {  // a product, so that NaN and infinities stay where they are dropped, as torch's do
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) y[i] = x[i] * (word[i] < threshold ? A(0) : scale);
    }
    finish(out, n, y);
  });
}

void add_dropout(Loops& loops) {
  loops.dropout[kFloat] = loop<float>;
  loops.dropout[kDouble] = loop<double>;
  loops.dropout[kBFloat16] = loop<bf16>;
  loops.dropout[kHalf] = loop<f16>;
}

}  // namespace FUSIBLE_ISA
