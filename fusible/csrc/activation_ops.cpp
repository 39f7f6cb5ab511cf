// The torch operators of activation.cpp.
#include <tuple>

#include "activation.h"
#include "rows.h"

using namespace tensors;
using Maybe = std::optional<Tensor>;

namespace {

void run_forward(const Tensor& x, const Maybe& bias, Tensor* pre, Tensor& y, int64_t which) {
  STD_TORCH_CHECK(!bias || bias->numel() == x.size(x.dim() - 1),
                  "fusible: the bias must have an element for each of a row's");
  const ScalarType dtype = x.scalar_type();
  const Rows in = bias ? rows(x) : elements(x);
  const Maybe b = bias_of(bias, dtype);
  ActivationForward a{};
  a.which = which, a.x = in.data, a.x_stride = in.stride, a.bias = data(b), a.width = in.w;
  a.pre = pre ? pre->mutable_data_ptr() : nullptr, a.y = y.mutable_data_ptr();
  const auto loop = loops().activation_forward[storage(dtype)];
  for_rows(in.n, in.w, [&](int64_t begin, int64_t end) { loop(a, begin, end); });
}

ActivationBackward backward_of(const Rows& dy, const Rows& record, Tensor& dx, Tensor* y, int64_t which) {
  ActivationBackward a{};
  a.which = which, a.dy = dy.data, a.dy_stride = dy.stride, a.record = record.data, a.record_stride = record.stride;
  a.dx = dx.mutable_data_ptr(), a.y = y ? y->mutable_data_ptr() : nullptr, a.width = dy.w;
  return a;
}

void run_backward(const Tensor& dy, const Tensor& record, Tensor& dx, Tensor* y, int64_t which) {
  check_same(dy, record, record.numel(), "dy");
  const bool flat = dy.is_contiguous() && record.is_contiguous();
  const Rows d = flat ? elements(dy) : rows(dy), r = flat ? elements(record) : rows(record);
  const ActivationBackward a = backward_of(d, r, dx, y, which);
  const auto loop = loops().activation_backward[storage(record.scalar_type())];
  for_rows(d.n, d.w, [&](int64_t begin, int64_t end) { loop(a, begin, end, nullptr); });
}

Tensor act(Tensor x, int64_t which) {
  Tensor y = empty(x);
  run_forward(x, std::nullopt, nullptr, y, which);
  return y;
}

// x must be contiguous, here and below.
void act_(Tensor x, int64_t which) { run_forward(x, std::nullopt, nullptr, x, which); }

Tensor dact(Tensor dy, Tensor record, int64_t which) {
  Tensor dx = empty(record);
  run_backward(dy, record, dx, nullptr, which);
  return dx;
}

std::tuple<Tensor, Tensor> bias_act(Tensor x, Tensor bias, int64_t which) {
  Tensor y = empty(x), pre = empty(x);
  run_forward(x, bias, &pre, y, which);
  return {y, pre};
}

Tensor bias_act_forget(Tensor x, Tensor bias, int64_t which) {
  Tensor y = empty(x);
  run_forward(x, bias, nullptr, y, which);
  return y;
}

// x + bias over x; returns y.
Tensor bias_act_(Tensor x, Tensor bias, int64_t which) {
  Tensor y = empty(x);
  run_forward(x, bias, &x, y, which);
  return y;
}

// y over x.
void bias_act_forget_(Tensor x, Tensor bias, int64_t which) { run_forward(x, bias, nullptr, x, which); }

// The sum of dx over the rows, besides dx and, if there is a y, the output.
Tensor run_backward_sums(const Tensor& dy, const Tensor& record, Tensor& dx, Tensor* y, int64_t which, ScalarType dtype) {
  check_same(dy, record, record.numel(), "dy");
  const Rows d = rows(dy), r = rows(record);
  const ActivationBackward a = backward_of(d, r, dx, y, which);
  const auto loop = loops().activation_backward[storage(record.scalar_type())];
  const int64_t block = std::max<int64_t>(16, 8192 / std::max<int64_t>(d.w, 1));  // short rows are summed in lanes
  return sum_of_rows(d.n, d.w, block, wide(record.scalar_type()), dtype,
                     [&](int64_t begin, int64_t end, void* sum) { loop(a, begin, end, sum); });
}

std::tuple<Tensor, Tensor> dact_dbias(Tensor dy, Tensor record, int64_t which, ScalarType dtype) {
  Tensor dx = empty(record);
  Tensor sums = run_backward_sums(dy, record, dx, nullptr, which, dtype);
  return {dx, sums};
}

std::tuple<Tensor, Tensor, Tensor> dact_dbias_recompute(Tensor dy, Tensor x, int64_t which, ScalarType dtype) {
  Tensor dx = empty(x), y = empty(x);
  Tensor sums = run_backward_sums(dy, x, dx, &y, which, dtype);
  return {dx, sums, y};
}

std::tuple<Tensor, Tensor> dact_recompute(Tensor dy, Tensor x, int64_t which) {
  Tensor dx = empty(x), y = empty(x);
  run_backward(dy, x, dx, &y, which);
  return {dx, y};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusible, m) {
  m.def("act(Tensor x, int which) -> Tensor");
  m.def("act_(Tensor(a!) x, int which) -> ()");
  m.def("dact(Tensor dy, Tensor record, int which) -> Tensor");
  m.def("bias_act(Tensor x, Tensor bias, int which) -> (Tensor, Tensor)");
  m.def("bias_act_forget(Tensor x, Tensor bias, int which) -> Tensor");
  m.def("bias_act_(Tensor(a!) x, Tensor bias, int which) -> Tensor");
  m.def("bias_act_forget_(Tensor(a!) x, Tensor bias, int which) -> ()");
  m.def("dact_dbias(Tensor dy, Tensor record, int which, ScalarType dtype) -> (Tensor, Tensor)");
  m.def("dact_dbias_recompute(Tensor dy, Tensor x, int which, ScalarType dtype) -> (Tensor, Tensor, Tensor)");
  m.def("dact_recompute(Tensor dy, Tensor x, int which) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fusible, CPU, m) {
  m.impl("act", TORCH_BOX(&act));
  m.impl("act_", TORCH_BOX(&act_));
  m.impl("dact", TORCH_BOX(&dact));
  m.impl("bias_act", TORCH_BOX(&bias_act));
  m.impl("bias_act_forget", TORCH_BOX(&bias_act_forget));
  m.impl("bias_act_", TORCH_BOX(&bias_act_));
  m.impl("bias_act_forget_", TORCH_BOX(&bias_act_forget_));
  m.impl("dact_dbias", TORCH_BOX(&dact_dbias));
  m.impl("dact_dbias_recompute", TORCH_BOX(&dact_dbias_recompute));
  m.impl("dact_recompute", TORCH_BOX(&dact_recompute));
}
