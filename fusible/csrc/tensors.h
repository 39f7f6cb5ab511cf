// Between torch tensors and the loops: rows of any layout, fresh results, gains in arithmetic form.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "loops.h"
#include "memory.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace tensors {

inline Storage storage(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return kFloat;
    case ScalarType::Double: return kDouble;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kHalf;
    default: STD_TORCH_CHECK(false, "fusible: kernels take float32, float64, bfloat16 and float16"); return kFloat;
  }
}

// The dtype of statistics and reductions.
inline ScalarType wide(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

// Results of at least this many bytes come from the caching allocator; smaller ones are cheaper from torch's.
inline int64_t& pool_from() {
  static int64_t bytes = int64_t(1) << 20;
  return bytes;
}

// A fresh contiguous tensor.
inline Tensor empty(const int64_t* sizes, int64_t dim, ScalarType dtype) {
  int64_t strides[64], numel = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = numel;
    numel *= std::max<int64_t>(sizes[d], 1);
  }
  int64_t count = 1;
  for (int64_t d = 0; d < dim; ++d) count *= sizes[d];
  const int64_t size = dtype == ScalarType::Double || dtype == ScalarType::Long ? 8
                       : dtype == ScalarType::Float                             ? 4
                       : dtype == ScalarType::Bool                              ? 1
                                                                                : 2;
  if (count * size >= pool_from()) {
    void* data = memory::allocate(size_t(count * size));
    return torch::stable::from_blob(
        data, {sizes, size_t(dim)}, {strides, size_t(dim)}, torch::stable::Device(torch::headeronly::DeviceType::CPU), dtype,
        &memory::release);
  }
  AtenTensorHandle handle;
  const int32_t shim = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, shim, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline Tensor empty(const Tensor& like, ScalarType dtype) {
  const auto sizes = like.sizes();
  return empty(sizes.data(), int64_t(sizes.size()), dtype);
}

inline Tensor empty(const Tensor& like) { return empty(like, like.scalar_type()); }

// A tensor as n rows of w elements, `stride` apart, each row dense; copied only where its layout does not allow that.
struct Rows {
  Tensor keep;
  const void* data;
  int64_t n, w, stride;
};

// The last `trailing` dimensions make a row.
inline Rows rows(const Tensor& t, int64_t trailing = 1) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const int64_t dim = int64_t(sizes.size());
  int64_t n = 1, w = 1;
  bool dense = true;
  for (int64_t d = dim - 1; d >= dim - trailing; --d) {
    dense = dense && (sizes[d] == 1 || strides[d] == w);
    w *= sizes[d];
  }
  int64_t stride = w, expected = -1;
  for (int64_t d = dim - trailing - 1; d >= 0; --d) {
    n *= sizes[d];
    if (sizes[d] == 1) continue;
    if (expected < 0) stride = strides[d];
    else dense = dense && strides[d] == expected;
    expected = strides[d] * sizes[d];
  }
  if (dense) return {t, t.const_data_ptr(), n, w, stride};
  Tensor copy = empty(t);
  torch::stable::copy_(copy, t);
  return {copy, copy.const_data_ptr(), n, w, w};
}

// A parameter in arithmetic form, one added if it is stored zero-centred.
inline std::optional<Tensor> gain(const std::optional<Tensor>& weight, ScalarType arithmetic, bool zero_centered) {
  if (!weight) return std::nullopt;
  if (!zero_centered && weight->scalar_type() == arithmetic && weight->is_contiguous()) return weight;
  Tensor out = empty(*weight, arithmetic);
  torch::stable::copy_(out, *weight);
  if (zero_centered) {
    const int64_t count = out.numel();
    if (arithmetic == ScalarType::Double) {
      double* p = static_cast<double*>(out.mutable_data_ptr());
      for (int64_t i = 0; i < count; ++i) p[i] += 1;
    } else {
      float* p = static_cast<float*>(out.mutable_data_ptr());
      for (int64_t i = 0; i < count; ++i) p[i] += 1;
    }
  }
  return out;
}

inline const void* data(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }

// Work of a thread below which starting another one costs more than it brings, in elements.
constexpr int64_t kGrain = 32768;

inline int64_t row_grain(int64_t w) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(w, 1)); }

// Rows are reduced in chunks that depend on the shape alone, so that any number of threads gives the same bits.
inline int64_t chunk_rows(int64_t n, int64_t w) {
  const int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(32, n * w / kGrain));
  return std::max<int64_t>(1, (n + chunks - 1) / chunks);
}

}  // namespace tensors
