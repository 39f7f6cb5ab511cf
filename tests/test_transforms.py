"""Where something looks through the code instead of running it, a block is plain torch: every transform works."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from test_gradient_rules import values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from twins import CASES, RULES, cases, close, tuple_of

import fusible
from fusible import kernels, ops

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own

both_rules = pytest.mark.parametrize("rules", RULES)
DETERMINISTIC = [case for case in CASES if case != "dropout"]
every_case = pytest.mark.parametrize("case", cases("named and kept", names=DETERMINISTIC))


def inputs(case: str) -> list[torch.Tensor]:
    return [values(place) for place in range(1 + CASES[case].extras)]


def gradients(run, leaves):
    outs = tuple_of(run())
    loss = sum((out * values(10 + place).view(out.shape)).sum() for place, out in enumerate(outs))
    return torch.autograd.grad(loss, leaves, allow_unused=True)


# -- compilers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ["mlp", "residual", "named and kept", "pre-norm", "extra in"])
def test_compile(case, dynamo):
    """In one graph, without a warning or a break; the second call compiles nothing."""
    block, twin = CASES[case].make()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    xs, ys = [t.requires_grad_() for t in inputs(case)], [t.requires_grad_() for t in inputs(case)]
    for _ in range(2):
        for a, b in zip(tuple_of(compiled(*xs)), tuple_of(twin(*ys)), strict=True):
            close(a.detach(), b.detach())
        mine = gradients(lambda: compiled(*xs), [*xs, *block.parameters()])
        theirs = gradients(lambda: twin(*ys), [*ys, *twin.parameters()])
        for a, b in zip(mine, theirs, strict=True):
            close(a, b)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]


def test_compile_with_changing_lengths(dynamo):
    block, twin = CASES["residual"].make()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5, 8, 13, 2):
        x = torch.randn(rows, 8, dtype=torch.float64)
        close(compiled(x).detach(), twin(x).detach())
    assert dynamo["stats"]["unique_graphs"] == 1


def test_compile_of_a_model_around_a_block(dynamo):
    block, twin = CASES["mlp"].make()
    model = torch.compile(torch.nn.Sequential(torch.nn.Softsign(), block), backend="aot_eager", fullgraph=True)
    close(model(values(0)).detach(), twin(torch.nn.functional.softsign(values(0))).detach())


def test_compile_without_gradients_and_with_dropout(dynamo):
    block, twin = CASES["dropout"].make()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.manual_seed(3)
        mine = compiled(values(0))
        torch.manual_seed(3)
        with kernels.use("reference"):  # as what is compiled, it draws the masks of torch
            close(mine, twin(values(0)))
        block.eval(), twin.eval()
        close(compiled(values(0)), twin(values(0)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("case", ["residual", "tanh", "make"])
def test_compiled_autograd(case, dynamo):
    """A backward pass that is traced itself: the block's node runs in it as it is."""
    block, twin = CASES[case].make()
    x, x2 = values(0).requires_grad_(), values(0).requires_grad_()
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            sum(out.square().sum() for out in tuple_of(block(x))).backward()
        sum(out.square().sum() for out in tuple_of(twin(x2))).backward()
    close(x.grad, x2.grad)
    for a, b in zip(block.parameters(), twin.parameters(), strict=True):
        close(a.grad, b.grad)


@every_case
def test_export(case):
    block, twin = CASES[case].make()
    exported = torch.export.export(block, tuple(inputs(case)))
    for a, b in zip(tuple_of(exported.module()(*inputs(case))), tuple_of(twin(*inputs(case))), strict=True):
        close(a.detach(), b.detach())
    assert all(
        str(node.target).startswith(("aten", "<built-in function getitem>"))
        for node in exported.graph.nodes
        if node.op == "call_function"
    )


def test_export_with_a_dynamic_length():
    block, twin = CASES["mlp"].make()
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(block, (values(0),), dynamic_shapes=({0: rows},)).module()
    x = torch.randn(17, 8, dtype=torch.float64)
    close(exported(x).detach(), twin(x).detach())


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="torch.onnx needs onnxscript, not installed")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
def test_onnx():
    block, _ = CASES["mlp"].make(dtype=torch.float32)
    program = torch.onnx.export(block.eval(), (values(0).float(),), dynamo=True, verbose=False)
    kinds = {node.op_type for node in program.model.graph}
    assert {"LayerNormalization", "Gemm", "Gelu"} <= kinds


@every_case
def test_make_fx(case):
    block, twin = CASES[case].make()
    graph = make_fx(block)(*inputs(case))
    xs = [t + 1 for t in inputs(case)]
    for a, b in zip(tuple_of(graph(*xs)), tuple_of(twin(*xs)), strict=True):
        close(a.detach(), b.detach())
    assert len([node for node in graph.graph.nodes if node.op == "call_function"]) >= len(twin.steps) - 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every_case
def test_jit_trace(case):
    block, twin = CASES[case].make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(block, tuple(inputs(case)))
    xs = [t + 1 for t in inputs(case)]
    for a, b in zip(tuple_of(traced(*xs)), tuple_of(twin(*xs)), strict=True):
        close(a.detach(), b.detach())


@every_case
def test_symbolic_trace(case):
    """Each op is one node of the graph, which then runs as the block's plain formulas do."""
    block, twin = CASES[case].make()
    graph = torch.fx.symbolic_trace(block)
    xs = [t + 1 for t in inputs(case)]
    for a, b in zip(tuple_of(graph(*xs)), tuple_of(twin(*xs)), strict=True):
        close(a.detach(), b.detach())


def test_symbolic_trace_of_a_model_around_a_block():
    class Model(torch.nn.Module):
        def __init__(self, block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x, r):
            return self.block(x * 2, r=r) + 1

    modules = [ops.RMSNorm(8), ops.AddExtraInput("r"), ops.Residual(torch.nn.Linear(8, 8)), ops.AddExtraInput("r")]
    model = Model(fusible.Sequential(*modules, inputs=("r",))).double()
    graph = torch.fx.symbolic_trace(model)
    close(graph(values(0), values(1)).detach(), model(values(0), values(1)).detach())
    graph = torch.fx.symbolic_trace(model.block)
    close(graph(values(0), r=values(1)).detach(), model.block(values(0), r=values(1)).detach())


def test_hooks_inside_a_block_are_seen_by_transforms():
    inner = torch.nn.Sequential(ops.Linear(8, 8))
    for hooked in (inner, inner[0], residual := ops.Residual(ops.SiLU())):
        block, calls = fusible.Sequential(inner, residual).double(), []
        handle = hooked.register_forward_pre_hook(lambda *a, calls=calls: calls.append(1))
        torch.func.vmap(block)(values(0))
        handle.remove()
        assert len(calls) == 1


# -- torch.func and forward mode ---------------------------------------------------------------------------------------


def functional(case: str, rules: str):
    block, twin = CASES[case].make(RULES[rules])

    def scalar(module):
        def run(params, *xs):
            outs = tuple_of(torch.func.functional_call(module, params, xs))
            return sum((out * out).sum() for out in outs)

        return run

    def params(module):
        return {str(place): p.detach() for place, (_, p) in enumerate(module.named_parameters())}

    def named(module, values_):
        return dict(zip([name for name, _ in module.named_parameters()], values_.values(), strict=True))

    return [(lambda p, *xs, m=m, f=scalar(m): f(named(m, p), *xs), params(m), m) for m in (block, twin)]


@both_rules
@every_case
def test_grad_and_vmap_and_jacrev(case, rules):
    results = []
    for run, params, module in functional(case, rules):
        xs = inputs(case)
        batch = [torch.stack([x, x + 1, x * 2]) for x in xs]
        found = [*torch.func.grad(run, argnums=(0, 1))(params, *xs)[0].values()]
        found.append(torch.func.grad(run, argnums=1)(params, *xs))
        found += torch.func.vmap(torch.func.grad(run), in_dims=(None, *[0] * len(xs)))(params, *batch).values()
        found.append(torch.func.vmap(lambda *x: tuple_of(module(*x))[0])(*batch).detach())
        found.append(torch.func.jacrev(lambda x: tuple_of(module(x, *xs[1:]))[0])(xs[0]).detach())
        found.append(torch.func.jacfwd(lambda x: tuple_of(module(x, *xs[1:]))[0])(xs[0]).detach())
        found.append(torch.func.hessian(lambda x: run(params, x, *xs[1:]))(xs[0]).detach())
        results.append(found)
    for number, (a, b) in enumerate(zip(*results, strict=True)):
        close(a, b, f"result {number}")


@both_rules
@every_case
def test_jvp_and_dual_tensors(case, rules):
    results = []
    for _, _, module in functional(case, rules):
        xs, tangents = inputs(case), [values(7 + place) for place in range(len(inputs(case)))]
        found = [*torch.func.jvp(lambda *x, m=module: tuple_of(m(*x))[0], tuple(xs), tuple(tangents))]
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(xs, tangents, strict=True)]
            found += torch.autograd.forward_ad.unpack_dual(tuple_of(module(*duals))[-1])
        results.append([t.detach() for t in found])
    for a, b in zip(*results, strict=True):
        close(a, b)


@both_rules
def test_functional_call_with_trained_tensors(rules):
    """Outside of transforms: the tensors given take the parameters' places, and get their gradients."""
    results = []
    for module in CASES["mlp"].make(RULES[rules]):
        given = {name: (p.detach() * 2).requires_grad_() for name, p in module.named_parameters()}
        y = torch.func.functional_call(module, given, (values(0),))
        results.append(torch.autograd.grad(y.square().sum(), list(given.values())))
        assert all(p.grad is None for p in module.parameters())
    for a, b in zip(*results, strict=True):
        close(a, b)


# -- tensors without data, tensors of other kinds ----------------------------------------------------------------------


@both_rules
@every_case
def test_fake_tensors(case, rules):
    with FakeTensorMode() as mode:
        block, _ = CASES[case].make(RULES[rules], torch.float32)
        xs = [torch.empty(3, 8, requires_grad=True) for _ in inputs(case)]
        outs = tuple_of(block(*xs))
    real = tuple_of(CASES[case].make()[1](*inputs(case)))
    assert [out.shape for out in outs] == [out.shape for out in real]
    if len(xs) == 1:  # outside of the mode
        assert tuple_of(block(mode.from_tensor(values(0).float())))[0].shape == real[0].shape
    sum(out.sum() for out in outs).backward()
    assert all(x.grad.shape == (3, 8) for x in xs)


@both_rules
@every_case
def test_meta_tensors(case, rules):
    block, _ = CASES[case].make(RULES[rules])
    block.to("meta")
    xs = [t.to("meta").requires_grad_() for t in inputs(case)]
    outs = tuple_of(block(*xs))
    assert all(out.is_meta for out in outs)
    sum(out.sum() for out in outs).backward()
    assert all(t.grad.is_meta for t in (*xs, *block.parameters()))


class Logged(torch.Tensor):
    """A subclass that sees the torch functions called on it."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A subclass around a tensor, which sees aten calls."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def bare(tree):
            return torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, tree)

        out = func(*bare(args), **bare(kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapped, out)


@both_rules
@every_case
def test_tensor_subclasses(case, rules):
    block, twin = CASES[case].make(RULES[rules])
    want = tuple_of(twin(*inputs(case)))
    Logged.seen.clear()
    for a, b in zip(tuple_of(block(*[t.as_subclass(Logged) for t in inputs(case)])), want, strict=True):
        assert type(a) is Logged
        close(a.as_subclass(torch.Tensor).detach(), b.detach())
    assert bool(Logged.seen) == (case not in ("identity", "empty", "make"))
    with torch.no_grad():
        for a, b in zip(tuple_of(block(*[Wrapped(t) for t in inputs(case)])), want, strict=True):
            assert type(a) is Wrapped
            close(a.inner, b.detach())


@both_rules
def test_one_extra_input_or_parameter_of_a_subclass(rules):
    block, twin = CASES["extra in"].make(RULES[rules])
    x, extra = inputs("extra in")
    y = block(x, extra.as_subclass(Logged))
    assert type(y) is Logged
    assert "Fused" not in type(y.grad_fn).__name__
    block[0].weight = torch.nn.Parameter(block[0].weight.detach().as_subclass(Logged))
    y = block(x, extra)
    assert type(y) is Logged
    assert "Fused" not in type(y.grad_fn).__name__
    close(y.as_subclass(torch.Tensor).detach(), twin(x, extra).detach())


class Passing(TorchDispatchMode):
    """A mode of a user's: it changes nothing, and the block still runs fused."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@both_rules
def test_under_a_users_mode(rules):
    block, twin = CASES["mlp"].make(RULES[rules])
    x = values(0)
    with Passing():
        y = block(x)
    assert "Fused" in type(y.grad_fn).__name__
    close(y.detach(), twin(values(0)).detach())
    with torch.device("meta"):  # a default device is a mode too
        y = block(x)
    close(y.detach(), twin(x).detach())


def test_reference_is_one_node_per_operation():
    block, _ = CASES["mlp"].make()
    assert "Fused" in type(block(values(0)).grad_fn).__name__
    assert "Fused" not in type(block.reference(values(0)).grad_fn).__name__
    assert isinstance(block, fusible.Sequential)
    assert isinstance(block[0], ops.LayerNorm)
