// Arguments of the dropout loops, forward and backward. n: rows, w: elements of a row; strides are between rows, in
// elements; y is dense. Element i of the rows taken one after another is dropped where word i of the stream is below
// `threshold`.
#pragma once

#include <cstdint>

#include "philox.h"

struct Dropout {
  Seed seed;
  uint32_t threshold;
  double scale;          // of what is kept
  const void* x;         // [n, w]
  int64_t x_stride;
  const void* residual;  // [n, w], added, or null
  int64_t residual_stride;
  void* y;               // [n, w]
  int64_t width;
};
