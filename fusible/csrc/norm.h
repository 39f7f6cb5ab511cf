// Arguments of the norm loops. n: rows, w: normalised elements of a row; strides are between rows, in elements.
#pragma once

#include <cstdint>

#include "philox.h"

// What is dropped: element i of the rows taken one after another, where word i of the stream is below `threshold`.
struct Mask {
  bool on;
  Seed seed;
  uint32_t threshold;
  double scale;  // of what is kept
};

struct NormForward {
  const void* x;         // [n, w]
  int64_t x_stride;
  Mask mask;             // of x, if there is a residual
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
  Mask mask;             // of `dropped`
  void* dropped;         // [n, w], dx behind the mask, or null
  const void* bias;      // [w] in arithmetic form, or null; read for y alone
  void* y;               // [n, w], forward's result computed again, or null
  double* dgain;         // [chunks, w] partial sums, or null
  double* dbias;         // [chunks, w], or null
  int64_t rows;
  int64_t chunk;         // rows of a chunk
  int64_t width;
  double scale;
};
