// Arguments of the cross-entropy loops. n: rows, v: classes; strides are between rows, in elements.
#pragma once

#include <cstdint>

struct CrossEntropy {
  const void* x;         // [n, v] logits
  int64_t x_stride;
  const int64_t* target; // [n], each below v or `ignored`
  int64_t target_stride;
  const void* weight;    // [v] of the classes, in arithmetic form; null for ones
  double total;          // the sum of the weights
  int64_t ignored;
  double smoothing;
  double z_loss;         // factor of the squared logarithm of the sum of exponentials
  double cap;            // logits become cap tanh(x / cap); 0 for none
  void* loss;            // [n] in arithmetic form; forward writes it
  void* stats;           // [n, 2]: the largest logit, and the logarithm of the sum of exponentials below it
  const void* scale;     // of the gradients, [n] or one, in arithmetic form
  int64_t scale_stride;
  void* dx;              // [n, v], may be x; null in a forward without gradients
  int64_t width;
};
