// Arguments of the norm loops. n: rows, w: normalised elements of a row; strides are between rows, in elements.
#pragma once

#include <cstdint>

struct NormForward {
  const void* x;         // [n, w]
  int64_t x_stride;
  const void* residual;  // [n, w], added to x first, or null
  int64_t residual_stride;
  void* sum;             // [n, w], x + residual, or null
  const void* gain;      // [w] in arithmetic form, or null
  const void* bias;      // [w] in arithmetic form, or null
  void* y;               // [n, w]
  void* mean;            // [n] in arithmetic form; null for RMSNorm and L2
  void* rstd;            // [n] in arithmetic form
  int64_t width;
  double scale;          // of the sum of squares: 1/w, or 1 for L2
  double eps;
};

struct NormBackward {
  const void* dy;        // [n, w]
  int64_t dy_stride;
  const void* x;         // [n, w]
  int64_t x_stride;
  const void* extra;     // [n, w], added to dx, or null
  int64_t extra_stride;
  const void* gain;      // [w] in arithmetic form, or null
  const void* mean;      // [n]; null for RMSNorm and L2
  const void* rstd;      // [n]
  void* dx;              // [n, w], or null
  void* dgain;           // [chunks, w] partial sums in arithmetic form, or null
  void* dbias;           // [chunks, w], or null
  int64_t rows;
  int64_t chunk;         // rows of a chunk
  int64_t width;
  double scale;
};
