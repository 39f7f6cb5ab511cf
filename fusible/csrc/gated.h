// Arguments of the loops over gated activations. n: rows, h: elements of a row of y; a row of x has 2h. Strides are between
// rows, in elements; what has no stride is dense. In blocks of `block` elements the gate and the rest alternate.
#pragma once

#include <cstdint>

enum Gated { kSwiGLU, kGEGLU, kGEGLUTanh, kQGEGLU, kReGLU, kSReGLU, kGLU, kClampedSwiGLU, kSiTUGLU, kGateds };

struct GatedShape {
  int64_t which;
  double options[3];
  int64_t half;     // h
  int64_t block;    // divides h; h if the halves do not alternate
  bool gate_first;
};

struct GatedForward {
  GatedShape shape;
  const void* x;     // [n, 2h]
  int64_t x_stride;
  const void* bias;  // [2h] in arithmetic form, or null
  void* pre;         // [n, 2h], x + bias if there is a bias; may be x
  void* y;           // [n, h]
};

struct GatedBackward {
  GatedShape shape;
  const void* dy;    // [n, h]
  int64_t dy_stride;
  const void* x;     // [n, 2h]
  int64_t x_stride;
  void* dx;          // [n, 2h]
  void* y;           // [n, h], the output computed again, or null
};
