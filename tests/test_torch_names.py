"""The private names of torch that fusible uses: each is there, and does what its comment in `_torch.py` says."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Mapping

import pytest
import torch
from test_transforms import Logged, Passing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fusible import _torch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # torch's own


class Asking(Function):
    """Notes what a question says in its forward and in its backward."""

    @staticmethod
    def forward(ctx, x, question, answers):
        ctx.question, ctx.answers = question, answers
        answers.append(question())
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        ctx.answers.append(ctx.question())
        return dy * 2, None, None


def asked(question, run) -> list:
    answers: list = []
    run(lambda x: Asking.apply(x, question, answers))
    return answers


def leaf() -> torch.Tensor:
    return torch.randn(3, requires_grad=True)


@pytest.mark.quick
def test_every_name_is_tested():
    names = [name for name in vars(_torch) if not name.startswith("__") and name not in ("annotations", "torch", "Any")]
    ours = [name for name in names if getattr(vars(_torch)[name], "__module__", "fusible._torch") not in ("typing",)]
    text = pathlib.Path(__file__).read_text()
    foreign = (
        "logging",
        "Iterator",
        "contextmanager",
        "peek_interpreter_stack",
        "_module",
        "_profiler",
        "_top_saved_tensors_default_hooks",
        "TorchDispatchMode",
    )
    assert [name for name in ours if name not in text and name not in foreign and not name.startswith("_")] == []


@pytest.mark.quick
def test_keep_graph():
    """False in a plain backward; True with `retain_graph`, `create_graph`, and outside of a backward."""
    assert _torch.keep_graph() is True
    ways = {
        "backward": (lambda f: f(leaf()).sum().backward(), False),
        "retain": (lambda f: f(leaf()).sum().backward(retain_graph=True), True),
        "create": (lambda f: torch.autograd.grad(f(x := leaf()).sum(), x, create_graph=True), True),
        "grad": (lambda f: torch.autograd.grad(f(x := leaf()).sum(), x), False),
    }
    for name, (run, want) in ways.items():
        assert asked(_torch.keep_graph, run) == [True, want], name


def test_keep_graph_in_nested_backwards():
    """A backward inside one says its own, and the outer one's comes back."""

    class Nested(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            before = _torch.keep_graph()
            with torch.enable_grad():
                (leaf() * 3).sum().backward(retain_graph=not before)
            assert _torch.keep_graph() is before
            return dy * 2

    for retain in (True, False):
        Nested.apply(leaf()).sum().backward(retain_graph=retain)


def test_shares_memory():
    x = torch.randn(4, 4)
    assert _torch.shares_memory(x, x.t())
    assert _torch.shares_memory(x[0], x[1])
    assert _torch.shares_memory(x, x.detach())
    assert not _torch.shares_memory(x, x.clone())
    with FakeTensorMode():
        y = torch.empty(3)
        assert _torch.shares_memory(y, y.view(3, 1))
        assert not _torch.shares_memory(y, y + 1)


def test_any_autocast():
    assert not _torch.any_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.any_autocast()
        with torch.autocast("cpu", enabled=False):
            assert not _torch.any_autocast()


def test_activations():
    x = torch.randn(5)
    pairs = {_torch.gelu_: nn.functional.gelu, _torch.silu_: nn.functional.silu}
    for in_place, plain in pairs.items():
        y = x.clone()
        assert in_place(y) is y
        assert torch.equal(y, plain(x))
    assert torch.equal(_torch.silu(x), nn.functional.silu(x))
    assert torch.equal(_torch.gelu_(x.clone(), approximate="tanh"), nn.functional.gelu(x, approximate="tanh"))


def test_dispatch_modes():
    assert _torch.dispatch_modes() == 0
    with Passing():
        assert _torch.dispatch_modes() == 1
        assert not _torch.seen_through()


def test_global_module_hooks():
    register = torch.nn.modules.module
    handles = [
        register.register_module_forward_pre_hook(lambda *a: None),
        register.register_module_forward_hook(lambda *a: None),
        register.register_module_full_backward_pre_hook(lambda *a: None),
        register.register_module_full_backward_hook(lambda *a: None),
    ]
    try:
        assert [len(hooks) for hooks in _torch.GLOBAL_MODULE_HOOKS] == [1, 1, 1, 1]
    finally:
        for handle in handles:
            handle.remove()
    assert not any(_torch.GLOBAL_MODULE_HOOKS)


def test_module_hooks():
    """The dictionaries are there, fill and empty, and stay the same objects."""
    module = nn.Linear(2, 2)
    before = [module.__dict__[name] for name in _torch.MODULE_HOOKS]
    handles = [
        module.register_forward_pre_hook(lambda *a: None),
        module.register_forward_hook(lambda *a: None),
        module.register_full_backward_pre_hook(lambda *a: None),
        module.register_full_backward_hook(lambda *a: None),
    ]
    assert [len(hooks) for hooks in before] == [1, 1, 1, 1]
    for handle in handles:
        handle.remove()
    module.to(torch.float64)
    assert all(module.__dict__[name] is hooks for name, hooks in zip(_torch.MODULE_HOOKS, before, strict=True))
    assert not any(before)


def test_saved_tensor_hooks():
    """True under hooks, `save_on_cpu` and non-reentrant checkpoints; False in reentrant ones, which set none."""
    assert not _torch.saved_tensor_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert _torch.saved_tensor_hooks()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not _torch.saved_tensor_hooks()
    for reentrant in (True, False):
        run = lambda f, reentrant=reentrant: checkpoint(f, leaf(), use_reentrant=reentrant)  # noqa: E731
        assert asked(_torch.saved_tensor_hooks, run) == [not reentrant]


def test_top_saved_tensor_hooks():
    """The innermost pair; nothing may be set while hooks are disabled."""
    assert _torch.top_saved_tensor_hooks() is None
    assert _torch.saved_tensor_hooks_allowed()
    hooks = [(lambda t: t, lambda t: t) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(*hooks[0]), torch.autograd.graph.saved_tensors_hooks(*hooks[1]):
        assert _torch.top_saved_tensor_hooks() == hooks[1]
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not _torch.saved_tensor_hooks_allowed()
        assert _torch.top_saved_tensor_hooks() is None


def test_batched_backward():
    x = leaf()
    seeds = torch.randn(5, 3)

    def old(f):
        torch.autograd.grad(f(x), x, seeds, is_grads_batched=True)

    def new(f):
        y = f(x)
        torch.func.vmap(lambda seed: torch.autograd.grad(y, x, seed, retain_graph=True))(seeds)

    for run in (old, new):
        assert asked(_torch.batched_backward, run) == [False, True]
    assert asked(_torch.batched_backward, lambda f: f(x).sum().backward()) == [False, False]


def test_seen_through():
    """True wherever something looks through the code."""
    said: list[bool] = []

    def look(x):
        said.append(_torch.seen_through())
        return x * 2

    x = torch.randn(3)
    look(x)
    look(x.as_subclass(Logged))
    assert said == [False, False]
    said.clear()
    torch.func.grad(lambda x: look(x).sum())(x)
    torch.func.vmap(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.jit.trace(look, x, check_trace=False)
    make_fx(look)(x)
    torch.func.functionalize(look)(x)
    with torch.autograd.forward_ad.dual_level():
        look(torch.autograd.forward_ad.make_dual(x, x))
    with FakeTensorMode():
        look(torch.empty(3))
    assert said == [True] * 8
    assert not _torch.seen_through()


def test_seen_through_by_compilers():
    def f(x):
        return x * 2 if _torch.seen_through() else x * 3

    x = torch.ones(3)
    assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(x), x * 2)

    class Module(nn.Module):
        def forward(self, x):
            return f(x)

    assert torch.equal(torch.export.export(Module(), (x,)).module()(x), x * 2)


def test_fake_mode():
    with _torch.fake_mode():
        x = torch.empty(3, 4)
        y = x @ torch.empty(4, 5)
        assert y.shape == (3, 5)
        assert type(y) is not torch.Tensor
        with _torch.quiet_fakes(), pytest.raises(Exception, match="_local_scalar_dense"):
            x.sum().item()
        assert (x + torch.ones(4)).shape == (3, 4)  # a real tensor among them


def test_quiet_fakes(caplog):
    with _torch.fake_mode(), _torch.quiet_fakes(), pytest.raises(Exception, match=r"."):
        torch.empty(3) @ torch.empty(4)
    assert "fake_tensor" not in caplog.text


def test_storage_id():
    x = torch.randn(4)
    assert _torch.storage_id(x) == _torch.storage_id(x[1:])
    assert _torch.storage_id(x) != _torch.storage_id(x.clone())
    with FakeTensorMode():
        y = torch.empty(3)
        assert _torch.storage_id(y) == _torch.storage_id(y.view(1, 3))
        assert _torch.storage_id(y) != _torch.storage_id(torch.empty(3))


def test_direct_apply():
    answers: list = []
    x = leaf()
    y = _torch.direct_apply(Asking)(x, lambda: 1, answers)
    y.sum().backward()
    assert answers == [1, 1]
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_cpu_capabilities():
    found = _torch.cpu_capabilities()
    assert isinstance(found, Mapping)
    assert all(isinstance(name, str) for name in found)


def test_bare():
    x = torch.ones(2)
    assert torch.equal(_torch.bare(torch.ops.aten.add.Tensor)(x, x), x + x)


def test_they_are_per_thread():
    """Hooks, modes and transforms of one thread are not another's."""
    said = []
    with torch.autograd.graph.save_on_cpu(), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        names = (_torch.saved_tensor_hooks, _torch.seen_through, _torch.any_autocast)
        thread = threading.Thread(target=lambda: said.extend(name() for name in names))
        thread.start()
        thread.join()
        assert all(name() for name in names)
    assert said == [False, False, False]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flash_cpu(dtype, causal):
    """Grouped heads, strided views, a mask added, no row that sees nothing gives NaN; the results' layouts."""
    x = torch.randn(2, 7, 8 * 6).to(dtype)
    q, k, v = x.view(2, 7, 8, 6).transpose(1, 2).split((4, 2, 2), 1)
    mask = torch.randn(7, 7).masked_fill_(torch.rand(7, 7) > 0.7, -torch.inf).to(dtype)
    mask[2] = -torch.inf
    out, lse = _torch.flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
    dout = torch.randn(2, 7, 4, 6).to(dtype).transpose(1, 2)
    grads = _torch.dflash_cpu(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=0.3)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.shape == (2, 4, 7)
    assert (out[:, :, 2] == 0).all()
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    whole = (
        mask.double().masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf) if causal else mask.double()
    )
    right = nn.functional.scaled_dot_product_attention(*leaves, whole, scale=0.3, enable_gqa=True)
    truth = torch.autograd.grad(right, leaves, dout.double())
    eps = torch.finfo(dtype).eps
    for mine, other in zip((out, *grads), (right, *truth), strict=True):
        torch.testing.assert_close(mine.double(), other.detach(), rtol=20 * eps, atol=20 * eps)


@pytest.mark.quick
def test_cpu_attention():
    """The names of the operators above."""
    assert str(_torch.cpu_attention) == "aten._scaled_dot_product_flash_attention_for_cpu"
    assert str(_torch.cpu_attention_backward) == "aten._scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.mark.quick
def test_without_data():
    x = torch.ones(2)
    assert not _torch.without_data(x)
    assert _torch.without_data(x.to("meta"))
    with FakeTensorMode():
        assert _torch.without_data(x)
    with Passing():
        assert not _torch.without_data(x)


@pytest.mark.quick
def test_profiler_runs():
    assert _torch.profiler_runs() is False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.profiler_runs() is True
        assert asked(_torch.profiler_runs, lambda call: call(leaf()).sum().backward()) == [True, True]
    with torch.autograd.profiler.profile():
        assert _torch.profiler_runs() is True
    assert _torch.profiler_runs() is False


@pytest.mark.quick
def test_will_accumulate():
    weight = torch.nn.Parameter(torch.ones(3))

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, d):
            answers.append(_torch.will_accumulate(weight))
            return d, d

    answers: list = []
    x = leaf()
    Asks.apply(x, weight).sum().backward()
    Asks.apply(x, weight).sum().backward(inputs=[x])
    torch.autograd.grad(Asks.apply(x, weight).sum(), [x])
    torch.autograd.grad(Asks.apply(x, weight).sum(), [x, weight])
    assert answers == [True, False, False, None]


@pytest.mark.quick
def test_weak_storage():
    """Keeps no memory, knows when it is gone, and says whose it is."""
    tensor = torch.ones(3)
    view, ref = tensor[1:], _torch.weak_storage(tensor)
    assert ref.cdata == _torch.storage_id(tensor) == _torch.storage_id(view)
    del tensor
    assert not ref.expired()
    del view
    assert ref.expired()
