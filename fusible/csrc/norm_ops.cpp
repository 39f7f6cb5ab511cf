// The torch operators of norm.cpp.
#include <cmath>
#include <tuple>

#include "norm.h"
#include "rows.h"

using namespace tensors;
using Maybe = std::optional<Tensor>;

namespace {

// Statistics have x's leading dimensions and a 1 for each normalised one.
Tensor statistics(const Tensor& x, int64_t trailing) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  for (size_t d = sizes.size() - size_t(trailing); d < sizes.size(); ++d) sizes[d] = 1;
  return empty(sizes.data(), int64_t(sizes.size()), wide(x.scalar_type()));
}

Mask mask_of(const Maybe& seed, double scale) {
  if (!seed) return {};
  STD_TORCH_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == 2, "fusible: a seed is two integers of int64");
  const int64_t* words = static_cast<const int64_t*>(seed->const_data_ptr());
  return {true, {uint64_t(words[0]), uint64_t(words[1])}, threshold_of(scale), scale};
}

// (y, mean, rstd, sum): mean without `center`, and sum without a residual, are tensors of no meaning.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& x, const Maybe& residual, const Mask& mask, const Maybe& weight, const Maybe& bias, double eps,
    int64_t trailing, bool zero_centered, bool center, bool mean_square) {
  const ScalarType dtype = x.scalar_type();
  const Rows in = rows(x, trailing);
  if (residual) check_same(*residual, x, x.numel(), "the residual");
  const Rows other = residual ? rows(*residual, trailing) : in;
  const Maybe g = gain(weight, wide(dtype), zero_centered), b = gain(bias, wide(dtype), false);
  Tensor y = empty(x), rstd = statistics(x, trailing), mean = center ? statistics(x, trailing) : rstd;
  Tensor total = residual ? empty(x) : y;
  NormForward a{};
  a.x = in.data, a.x_stride = in.stride, a.mask = mask;
  if (residual) a.residual = other.data, a.residual_stride = other.stride, a.sum = total.mutable_data_ptr();
  a.gain = data(g), a.bias = data(b);
  a.y = y.mutable_data_ptr(), a.rstd = rstd.mutable_data_ptr(), a.mean = center ? mean.mutable_data_ptr() : nullptr;
  a.width = in.w, a.scale = mean_square ? 1.0 / double(std::max<int64_t>(in.w, 1)) : 1.0, a.eps = eps;
  const auto loop = loops().norm_forward[storage(dtype)];
  torch::stable::parallel_for(0, in.n, row_grain(in.w), [&](int64_t begin, int64_t end) { loop(a, begin, end); });
  return {y, mean, rstd, total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm(
    Tensor x, Maybe residual, Maybe weight, Maybe bias, double eps, int64_t trailing, bool zero_centered, bool center,
    bool mean_square) {
  return forward(x, residual, {}, weight, bias, eps, trailing, zero_centered, center, mean_square);
}

// norm(dropout(x) + residual); scale: 1 / (1 - p).
std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_norm(
    Tensor x, Tensor residual, Tensor seed, double scale, Maybe weight, Maybe bias, double eps, int64_t trailing,
    bool zero_centered, bool center) {
  return forward(x, residual, mask_of(seed, scale), weight, bias, eps, trailing, zero_centered, center, true);
}

// What a backward pass may be asked for beside the gradients of x and the parameters.
struct More {
  Tensor* dropped;
  Mask mask;
  Tensor* y;
  const Maybe* bias;
};

// (dx, dweight, dbias); what is not wanted is a tensor of no meaning.
std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& x, const Maybe& mean, const Tensor& rstd, const Maybe& weight, const Maybe& extra,
    const More& more, int64_t trailing, bool zero_centered, bool mean_square, bool want_x, bool want_weight,
    bool want_bias) {
  const ScalarType dtype = x.scalar_type(), arithmetic = wide(dtype);
  check_same(dy, x, x.numel(), "dy");
  if (extra) check_same(*extra, x, x.numel(), "the extra gradient");
  const Rows d = rows(dy, trailing), in = rows(x, trailing);
  const Rows other = extra ? rows(*extra, trailing) : in;
  const Maybe g = gain(weight, arithmetic, zero_centered);
  const Maybe b = more.bias ? gain(*more.bias, arithmetic, false) : std::nullopt;
  NormBackward a{};
  a.dy = d.data, a.dy_stride = d.stride, a.x = in.data, a.x_stride = in.stride;
  if (extra) a.extra = other.data, a.extra_stride = other.stride;
  a.gain = data(g), a.mean = data(mean), a.rstd = rstd.const_data_ptr(), a.bias = data(b);
  a.rows = in.n, a.width = in.w, a.scale = mean_square ? 1.0 / double(std::max<int64_t>(in.w, 1)) : 1.0;
  a.chunk = chunk_rows(in.n, in.w);
  if (more.dropped) a.mask = more.mask, a.dropped = more.dropped->mutable_data_ptr();
  if (more.y) a.y = more.y->mutable_data_ptr();
  const int64_t chunks = std::max<int64_t>(1, (in.n + a.chunk - 1) / a.chunk);
  Tensor dx = want_x ? empty(x) : rstd;
  if (want_x) a.dx = dx.mutable_data_ptr();
  const Scratch<double> partial(chunks * in.w * (int64_t(want_weight) + int64_t(want_bias)));
  double* next = partial.get();
  if (want_weight) a.dgain = next, next += chunks * in.w;
  if (want_bias) a.dbias = next;
  const auto loop = loops().norm_backward[storage(dtype)];
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) { loop(a, begin, end); });
  const int64_t* shape = x.sizes().data() + (x.dim() - trailing);
  const ScalarType out = weight ? weight->scalar_type() : arithmetic;
  const auto sum = [&](double* parts) {
    Tensor total = empty(shape, trailing, out);
    add_chunks(parts, chunks, in.w);
    rounded(parts, in.w, total);
    return total;
  };
  Tensor dweight = want_weight ? sum(a.dgain) : rstd, dbias = want_bias ? sum(a.dbias) : rstd;
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> dnorm(
    Tensor dy, Tensor x, Maybe mean, Tensor rstd, Maybe weight, Maybe extra, int64_t trailing, bool zero_centered,
    bool mean_square, bool want_x, bool want_weight, bool want_bias) {
  return backward(dy, x, mean, rstd, weight, extra, {}, trailing, zero_centered, mean_square, want_x, want_weight, want_bias);
}

// (dx, dweight, dbias, y): forward's result too.
std::tuple<Tensor, Tensor, Tensor, Tensor> dnorm_recompute(
    Tensor dy, Tensor x, Maybe mean, Tensor rstd, Maybe weight, Maybe bias, Maybe extra, int64_t trailing,
    bool zero_centered, bool want_weight, bool want_bias) {
  Tensor y = empty(x);
  auto [dx, dweight, dbias] = backward(dy, x, mean, rstd, weight, extra, {nullptr, {}, &y, &bias}, trailing, zero_centered,
                                       true, true, want_weight, want_bias);
  return {dx, dweight, dbias, y};
}

// (dropped, dx, dweight, dbias): dx behind the mask of `dropout_add_norm` too.
std::tuple<Tensor, Tensor, Tensor, Tensor> ddropout_add_norm(
    Tensor dy, Tensor x, Maybe mean, Tensor rstd, Maybe weight, Maybe extra, Tensor seed, double scale, int64_t trailing,
    bool zero_centered, bool want_weight, bool want_bias) {
  Tensor dropped = empty(x);
  auto [dx, dweight, dbias] = backward(dy, x, mean, rstd, weight, extra, {&dropped, mask_of(seed, scale), nullptr, nullptr},
                                       trailing, zero_centered, true, true, want_weight, want_bias);
  return {dropped, dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusible, m) {
  m.def(
      "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int trailing, bool zero_centered, bool "
      "center, bool mean_square) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "dnorm(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? extra, int trailing, bool "
      "zero_centered, bool mean_square, bool want_x, bool want_weight, bool want_bias) -> (Tensor, Tensor, Tensor)");
  m.def(
      "dropout_add_norm(Tensor x, Tensor residual, Tensor seed, float scale, Tensor? weight, Tensor? bias, float eps, int "
      "trailing, bool zero_centered, bool center) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "dnorm_recompute(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? extra, int "
      "trailing, bool zero_centered, bool want_weight, bool want_bias) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "ddropout_add_norm(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? extra, Tensor seed, float "
      "scale, int trailing, bool zero_centered, bool want_weight, bool want_bias) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fusible, CPU, m) {
  m.impl("dropout_add_norm", TORCH_BOX(&dropout_add_norm));
  m.impl("dnorm_recompute", TORCH_BOX(&dnorm_recompute));
  m.impl("ddropout_add_norm", TORCH_BOX(&ddropout_add_norm));
  m.impl("norm", TORCH_BOX(&norm));
  m.impl("dnorm", TORCH_BOX(&dnorm));
}
