// The torch operators of gated.cpp.
#include <tuple>

#include "gated.h"
#include "rows.h"

using namespace tensors;
using Maybe = std::optional<Tensor>;

namespace {

// `block` 0: the halves do not alternate.
GatedShape shape_of(
    const Tensor& x, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3) {
  const int64_t width = x.size(x.dim() - 1);
  STD_TORCH_CHECK(width % (block ? 2 * block : 2) == 0, "fusible: x's last dimension cannot be split in two, it is ",
                  width);
  return {which, {option1, option2, option3}, width / 2, block ? block : width / 2, gate_first};
}

Tensor empty_half(const Tensor& x) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  return empty(sizes.data(), int64_t(sizes.size()), x.scalar_type());
}

Tensor run_forward(const Tensor& x, const Maybe& bias, Tensor* pre, const GatedShape& shape) {
  STD_TORCH_CHECK(!bias || bias->numel() == 2 * shape.half, "fusible: the bias must have an element for each of a row's");
  const ScalarType dtype = x.scalar_type();
  const Rows in = rows(x);
  const Maybe b = bias_of(bias, dtype);
  Tensor y = empty_half(x);
  GatedForward g{};
  g.shape = shape, g.x = in.data, g.x_stride = in.stride, g.bias = data(b);
  g.pre = pre ? pre->mutable_data_ptr() : nullptr, g.y = y.mutable_data_ptr();
  const auto loop = loops().gated_forward[storage(dtype)];
  for_rows(in.n, in.w, [&](int64_t begin, int64_t end) { loop(g, begin, end); });
  return y;
}

GatedBackward backward_of(const Rows& dy, const Rows& x, Tensor& dx, Tensor* y, const GatedShape& shape) {
  GatedBackward g{};
  g.shape = shape, g.dy = dy.data, g.dy_stride = dy.stride, g.x = x.data, g.x_stride = x.stride;
  g.dx = dx.mutable_data_ptr(), g.y = y ? y->mutable_data_ptr() : nullptr;
  return g;
}

Tensor run_backward(const Tensor& dy, const Tensor& x, Tensor* y, const GatedShape& shape) {
  check_same(dy, x, x.numel() / 2, "dy");
  Tensor dx = empty(x);
  const Rows d = rows(dy), in = rows(x);
  const GatedBackward g = backward_of(d, in, dx, y, shape);
  const auto loop = loops().gated_backward[storage(x.scalar_type())];
  for_rows(in.n, in.w, [&](int64_t begin, int64_t end) { loop(g, begin, end, nullptr); });
  return dx;
}

Tensor gated(Tensor x, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3) {
  return run_forward(x, std::nullopt, nullptr, shape_of(x, which, gate_first, block, option1, option2, option3));
}

// (y, x + bias)
std::tuple<Tensor, Tensor> bias_gated(
    Tensor x, Tensor bias, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3) {
  Tensor pre = empty(x);
  Tensor y = run_forward(x, bias, &pre, shape_of(x, which, gate_first, block, option1, option2, option3));
  return {y, pre};
}

// x + bias over x, which must be contiguous; returns y.
Tensor bias_gated_(
    Tensor x, Tensor bias, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3) {
  return run_forward(x, bias, &x, shape_of(x, which, gate_first, block, option1, option2, option3));
}

Tensor dgated(
    Tensor dy, Tensor x, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3) {
  return run_backward(dy, x, nullptr, shape_of(x, which, gate_first, block, option1, option2, option3));
}

std::tuple<Tensor, Tensor> dgated_recompute(
    Tensor dy, Tensor x, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3) {
  Tensor y = empty_half(x);
  Tensor dx = run_backward(dy, x, &y, shape_of(x, which, gate_first, block, option1, option2, option3));
  return {dx, y};
}

Tensor run_backward_sums(const Tensor& dy, const Tensor& x, Tensor& dx, Tensor* y, const GatedShape& shape, ScalarType dtype) {
  check_same(dy, x, x.numel() / 2, "dy");
  const Rows d = rows(dy), in = rows(x);
  const GatedBackward g = backward_of(d, in, dx, y, shape);
  const auto loop = loops().gated_backward[storage(x.scalar_type())];
  return sum_of_rows(in.n, in.w, 16, wide(x.scalar_type()), dtype,
                     [&](int64_t begin, int64_t end, void* sum) { loop(g, begin, end, sum); });
}

std::tuple<Tensor, Tensor> dgated_dbias(
    Tensor dy, Tensor x, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3,
    ScalarType dtype) {
  Tensor dx = empty(x);
  const GatedShape shape = shape_of(x, which, gate_first, block, option1, option2, option3);
  Tensor sums = run_backward_sums(dy, x, dx, nullptr, shape, dtype);
  return {dx, sums};
}

std::tuple<Tensor, Tensor, Tensor> dgated_dbias_recompute(
    Tensor dy, Tensor x, int64_t which, bool gate_first, int64_t block, double option1, double option2, double option3,
    ScalarType dtype) {
  Tensor dx = empty(x), y = empty_half(x);
  const GatedShape shape = shape_of(x, which, gate_first, block, option1, option2, option3);
  Tensor sums = run_backward_sums(dy, x, dx, &y, shape, dtype);
  return {dx, sums, y};
}

}  // namespace

#define FUSIBLE_SHAPE "int which, bool gate_first, int block, float option1, float option2, float option3"

STABLE_TORCH_LIBRARY_FRAGMENT(fusible, m) {
  m.def("gated(Tensor x, " FUSIBLE_SHAPE ") -> Tensor");
  m.def("bias_gated(Tensor x, Tensor bias, " FUSIBLE_SHAPE ") -> (Tensor, Tensor)");
  m.def("bias_gated_(Tensor(a!) x, Tensor bias, " FUSIBLE_SHAPE ") -> Tensor");
  m.def("dgated(Tensor dy, Tensor x, " FUSIBLE_SHAPE ") -> Tensor");
  m.def("dgated_recompute(Tensor dy, Tensor x, " FUSIBLE_SHAPE ") -> (Tensor, Tensor)");
  m.def("dgated_dbias(Tensor dy, Tensor x, " FUSIBLE_SHAPE ", ScalarType dtype) -> (Tensor, Tensor)");
  m.def("dgated_dbias_recompute(Tensor dy, Tensor x, " FUSIBLE_SHAPE ", ScalarType dtype) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fusible, CPU, m) {
  m.impl("gated", TORCH_BOX(&gated));
  m.impl("bias_gated", TORCH_BOX(&bias_gated));
  m.impl("bias_gated_", TORCH_BOX(&bias_gated_));
  m.impl("dgated", TORCH_BOX(&dgated));
  m.impl("dgated_recompute", TORCH_BOX(&dgated_recompute));
  m.impl("dgated_dbias", TORCH_BOX(&dgated_dbias));
  m.impl("dgated_dbias_recompute", TORCH_BOX(&dgated_dbias_recompute));
}
