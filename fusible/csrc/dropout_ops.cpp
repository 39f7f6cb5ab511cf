// The torch operators of dropout.cpp.
#include <cmath>

#include "dropout.h"
#include "rows.h"

using namespace tensors;
using Maybe = std::optional<Tensor>;

namespace {

Tensor run(const Tensor& x, const Maybe& residual, const Tensor& seed, double scale) {
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.numel() == 2, "fusible: a seed is two integers of int64");
  if (residual) check_same(*residual, x, x.numel(), "the residual");
  const ScalarType dtype = x.scalar_type();
  const bool flat = x.is_contiguous() && (!residual || residual->is_contiguous());
  const Rows in = flat ? elements(x) : rows(x), other = !residual ? in : flat ? elements(*residual) : rows(*residual);
  const int64_t* words = static_cast<const int64_t*>(seed.const_data_ptr());
  Tensor y = empty(x);
  Dropout d{};
  d.seed = {uint64_t(words[0]), uint64_t(words[1])};
  d.threshold = threshold_of(scale), d.scale = scale;
  d.x = in.data, d.x_stride = in.stride, d.y = y.mutable_data_ptr(), d.width = in.w;
  if (residual) d.residual = other.data, d.residual_stride = other.stride;
  const auto loop = loops().dropout[storage(dtype)];
  for_rows(in.n, in.w, [&](int64_t begin, int64_t end) { loop(d, begin, end); });
  return y;
}

// scale: 1 / (1 - p). seed: [2], int64. Its own backward: the same seed gives the same mask.
Tensor dropout(Tensor x, Tensor seed, double scale) { return run(x, std::nullopt, seed, scale); }

// dropout(x) + residual
Tensor dropout_add(Tensor x, Tensor residual, Tensor seed, double scale) { return run(x, residual, seed, scale); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusible, m) {
  m.def("dropout(Tensor x, Tensor seed, float scale) -> Tensor");
  m.def("dropout_add(Tensor x, Tensor residual, Tensor seed, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fusible, CPU, m) {
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("dropout_add", TORCH_BOX(&dropout_add));
}
