// The arguments of rotary.cpp's loops.
#pragma once

#include <cstdint>

// Rows [b, e) of a packed tensor made of up to three parts side by side, each of whole heads.
struct Rotary {
  struct Part {
    const void* data;
    int64_t stride, heads;
  };
  Part parts[3];
  int64_t count;       // of parts
  void* y;             // [n, width], dense rows; the first part itself where the rotation is in place
  int64_t y_stride;
  const void* table;   // [period, turned] in arithmetic form: cosines, then sines
  int64_t period, head, turned, heads;  // `turned` elements of each of the first `heads` heads of `head` elements
  bool interleaved, inverse, in_place;
};
