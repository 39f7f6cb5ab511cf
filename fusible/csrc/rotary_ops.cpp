// The torch operators of rotary.cpp.
#include "rotary.h"

#include "rows.h"

using namespace tensors;
using Maybe = std::optional<Tensor>;

namespace {

void run(Rotary& r, const Tensor& table, ScalarType dtype, int64_t rows_) {
  STD_TORCH_CHECK(table.scalar_type() == wide(dtype) && table.is_contiguous(), "fusible: a table is dense, in arithmetic form");
  r.table = table.const_data_ptr();
  r.turned = table.sizes()[size_t(table.dim() - 1)];
  r.period = r.turned ? std::max<int64_t>(1, table.numel() / r.turned) : 1;
  STD_TORCH_CHECK(r.turned % 2 == 0 && r.turned <= r.head && rows_ % r.period == 0, "fusible: a table must fit its rows");
  int64_t heads = 0;
  for (int64_t p = 0; p < r.count; ++p) heads += r.parts[p].heads;
  STD_TORCH_CHECK(r.heads <= heads, "fusible: more heads to rotate than there are");
  const auto loop = loops().rotary[storage(dtype)];
  for_rows(rows_, heads * r.head, [&](int64_t begin, int64_t end) { loop(r, begin, end); });
}

Rotary::Part part(const Rows& rows, int64_t head) { return {rows.data, rows.stride, rows.w / head}; }

// x: [..., heads * head], rotated by the table's angles; the table's rows repeat.
Tensor rotate(Tensor x, Tensor table, int64_t heads, int64_t head, bool interleaved, bool inverse) {
  Rotary r{};
  const Rows in = rows(x);
  STD_TORCH_CHECK(in.w % head == 0, "fusible: a row must be whole heads");
  Tensor y = empty(x);
  r.parts[0] = part(in, head), r.count = 1;
  r.y = y.mutable_data_ptr(), r.y_stride = in.w;
  r.head = head, r.heads = heads, r.interleaved = interleaved, r.inverse = inverse;
  run(r, table, x.scalar_type(), in.n);
  return y;
}

// The same, written over x, which is contiguous.
void rotate_(Tensor x, Tensor table, int64_t heads, int64_t head, bool interleaved, bool inverse) {
  STD_TORCH_CHECK(x.is_contiguous(), "fusible: rotate_ takes a contiguous tensor");
  Rotary r{};
  const Rows in = rows(x);
  STD_TORCH_CHECK(in.w % head == 0, "fusible: a row must be whole heads");
  r.parts[0] = part(in, head), r.count = 1, r.in_place = true;
  r.y = x.mutable_data_ptr(), r.y_stride = in.w;
  r.head = head, r.heads = heads, r.interleaved = interleaved, r.inverse = inverse;
  run(r, table, x.scalar_type(), in.n);
}

// Three tensors [..., heads, head] side by side: [..., all heads * head], the first ones rotated; without a table, none.
Tensor pack(Tensor q, Tensor k, Tensor v, Maybe table, int64_t heads, bool interleaved, bool inverse) {
  Rotary r{};
  const int64_t dim = q.dim(), head = q.sizes()[size_t(dim - 1)];
  const Rows in[3] = {rows(q, 2), rows(k, 2), rows(v, 2)};
  int64_t width = 0;
  for (const Rows& part_ : in) {
    STD_TORCH_CHECK(part_.n == in[0].n && part_.w % head == 0, "fusible: parts must have the same rows and whole heads");
    r.parts[r.count++] = part(part_, head);
    width += part_.w;
  }
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "fusible: parts must have one dtype");
  std::vector<int64_t> sizes(q.sizes().begin(), q.sizes().end() - 2);
  sizes.push_back(width);
  Tensor y = empty(sizes.data(), int64_t(sizes.size()), q.scalar_type());
  r.y = y.mutable_data_ptr(), r.y_stride = width;
  r.head = head, r.heads = heads, r.interleaved = interleaved, r.inverse = inverse;
  if (table) {
    run(r, *table, q.scalar_type(), in[0].n);
  } else {
    r.heads = 0, r.period = 1;
    const auto loop = loops().rotary[storage(q.scalar_type())];
    for_rows(in[0].n, width, [&](int64_t begin, int64_t end) { loop(r, begin, end); });
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusible, m) {
  m.def("rotate(Tensor x, Tensor table, int heads, int head, bool interleaved, bool inverse) -> Tensor");
  m.def("rotate_(Tensor(a!) x, Tensor table, int heads, int head, bool interleaved, bool inverse) -> ()");
  m.def("pack(Tensor q, Tensor k, Tensor v, Tensor? table, int heads, bool interleaved, bool inverse) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fusible, CPU, m) {
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("rotate_", TORCH_BOX(&rotate_));
  m.impl("pack", TORCH_BOX(&pack));
}
