// Arguments of the loops over pointwise activations. n: rows, w: elements of a row; strides are between rows, in
// elements; what has no stride is dense. Without a bias or sums dense tensors may come as n rows of one element.
#pragma once

#include <cstdint>

enum Activation { kGelu, kGeluTanh, kQGelu, kRelu, kSRelu, kSilu, kSigmoid, kTanh, kActivations };

struct ActivationForward {
  int64_t which;
  const void* x;     // [n, w]
  int64_t x_stride;
  const void* bias;  // [w] in arithmetic form, or null
  void* pre;         // [n, w], x + bias, or null; may be x
  void* y;           // [n, w]; may be x if pre is null
  int64_t width;
};

struct ActivationBackward {
  int64_t which;
  const void* dy;      // [n, w]
  int64_t dy_stride;
  const void* record;  // [n, w]: x, or y for ReLU, Sigmoid and Tanh
  int64_t record_stride;
  void* dx;            // [n, w]
  void* y;             // [n, w], the output computed again, or null; not for Sigmoid and Tanh
  int64_t width;
};
