// The torch operators of cross_entropy.cpp.
#include <tuple>

#include "cross_entropy.h"
#include "rows.h"

using namespace tensors;
using Maybe = std::optional<Tensor>;

namespace {

// Targets one after another.
Rows targets_of(const Tensor& target) {
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long, "fusible: targets must be of int64");
  if (target.dim() == 1) return {target, target.const_data_ptr(), target.numel(), 1, target.stride(0)};
  if (target.is_contiguous()) return {target, target.const_data_ptr(), target.numel(), 1, 1};
  Tensor copy = empty(target);
  torch::stable::copy_(copy, target);
  return {copy, copy.const_data_ptr(), copy.numel(), 1, 1};
}

// The place of the first target that is no class and not ignored, or -1; the sums of the weights of the targets that are
// not ignored, and of all classes.
std::tuple<int64_t, double, double> count_targets(Tensor target, Maybe weight, int64_t classes, int64_t ignored) {
  const Rows targets = targets_of(target);
  const Maybe w = gain(weight, ScalarType::Double, false);
  const double* weights = static_cast<const double*>(data(w));
  const int64_t* t = static_cast<const int64_t*>(targets.data);
  double of_rows = 0, of_classes = weights ? 0 : double(classes);
  for (int64_t j = 0; weights && j < classes; ++j) of_classes += weights[j];
  for (int64_t r = 0; r < targets.n; ++r) {
    const int64_t it = t[r * targets.stride];
    if (it == ignored) continue;
    if (it < 0 || it >= classes) return {r, 0, of_classes};
    of_rows += weights ? weights[it] : 1;
  }
  return {-1, of_rows, of_classes};
}

struct Options {
  double of_classes;
  int64_t ignored;
  double smoothing, z_loss, cap;
};

CrossEntropy arguments(
    const Rows& x, const Rows& targets, const Maybe& weight, const Options& options, const Maybe& scale, Tensor* dx) {
  STD_TORCH_CHECK(targets.n == x.n, "fusible: there must be a target for each row");
  STD_TORCH_CHECK(!weight || weight->numel() == x.w, "fusible: there must be a weight for each class");
  CrossEntropy a{};
  a.x = x.data, a.x_stride = x.stride, a.width = x.w;
  a.target = static_cast<const int64_t*>(targets.data), a.target_stride = targets.stride;
  a.weight = data(weight), a.total = options.of_classes, a.ignored = options.ignored;
  a.smoothing = options.smoothing, a.z_loss = options.z_loss, a.cap = options.cap;
  if (!dx) return a;
  STD_TORCH_CHECK(dx->is_contiguous() && dx->numel() == x.n * x.w && dx->scalar_type() == x.keep.scalar_type(),
                  "fusible: dx must be contiguous, with the elements and the dtype of x");
  STD_TORCH_CHECK(scale && scale->is_contiguous() && scale->scalar_type() == wide(dx->scalar_type()) &&
                      (scale->numel() == x.n || scale->numel() == 1),
                  "fusible: the scale must be one number, or one for each row, in arithmetic form");
  a.dx = dx->mutable_data_ptr();
  a.scale = scale->const_data_ptr(), a.scale_stride = scale->numel() == 1 ? 0 : 1;
  return a;
}

// (loss, stats): [...], [..., 2]; the gradient goes to dx, which may be x.
std::tuple<Tensor, Tensor> cross_entropy(
    Tensor x, Tensor target, Maybe weight, double of_classes, int64_t ignored, double smoothing, double z_loss, double cap,
    Maybe scale, Maybe dx) {
  const ScalarType dtype = x.scalar_type();
  const Rows in = rows(x), targets = targets_of(target);
  const Maybe w = gain(weight, wide(dtype), false);
  CrossEntropy a = arguments(in, targets, w, {of_classes, ignored, smoothing, z_loss, cap}, scale, dx ? &*dx : nullptr);
  std::vector<int64_t> sizes(target.sizes().begin(), target.sizes().end());
  Tensor loss = empty(sizes.data(), int64_t(sizes.size()), wide(dtype));
  sizes.push_back(2);
  Tensor stats = empty(sizes.data(), int64_t(sizes.size()), wide(dtype));
  a.loss = loss.mutable_data_ptr(), a.stats = stats.mutable_data_ptr();
  const auto loop = loops().cross_entropy_forward[storage(dtype)];
  for_rows(in.n, in.w, [&](int64_t begin, int64_t end) { loop(a, begin, end); });
  return {loss, stats};
}

// The gradient by the stats of a forward pass, to dx, which may be x.
void dcross_entropy(
    Tensor x, Tensor target, Tensor stats, Tensor scale, Maybe weight, double of_classes, int64_t ignored, double smoothing,
    double z_loss, double cap, Tensor dx) {
  const ScalarType dtype = x.scalar_type();
  const Rows in = rows(x), targets = targets_of(target);
  const Maybe w = gain(weight, wide(dtype), false);
  STD_TORCH_CHECK(stats.is_contiguous() && stats.scalar_type() == wide(dtype) && stats.numel() == 2 * in.n,
                  "fusible: there must be two statistics for each row, in arithmetic form");
  CrossEntropy a = arguments(in, targets, w, {of_classes, ignored, smoothing, z_loss, cap}, scale, &dx);
  a.stats = const_cast<void*>(stats.const_data_ptr());
  const auto loop = loops().cross_entropy_backward[storage(dtype)];
  for_rows(in.n, in.w, [&](int64_t begin, int64_t end) { loop(a, begin, end); });
}

}  // namespace

#define FUSIBLE_OPTIONS "float of_classes, int ignored, float smoothing, float z_loss, float cap"

STABLE_TORCH_LIBRARY_FRAGMENT(fusible, m) {
  m.def("count_targets(Tensor target, Tensor? weight, int classes, int ignored) -> (int, float, float)");
  m.def(
      "cross_entropy(Tensor x, Tensor target, Tensor? weight, " FUSIBLE_OPTIONS
      ", Tensor? scale, Tensor(a!)? dx) -> (Tensor, Tensor)");
  m.def(
      "dcross_entropy(Tensor x, Tensor target, Tensor stats, Tensor scale, Tensor? weight, " FUSIBLE_OPTIONS
      ", Tensor(a!) dx) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fusible, CPU, m) {
  m.impl("count_targets", TORCH_BOX(&count_targets));
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("dcross_entropy", TORCH_BOX(&dcross_entropy));
}
