"""Public bug reports against other projects, as scenarios: what went wrong there must be right here.

Each test is named by the id and the public source of a report. Every scenario runs with the default rules and with
none, beside the same chain of `torch.nn` modules. B014 and B039 are in `test_main_grad.py`. Left out until fusible has
what it is about: B036.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from twins import RULES, SwiGLU

import fusible
from fusible import Op, ops

LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True, params=RULES)
def rules(request):
    """Every scenario with default rules and with none."""
    with fusible.use_rules(RULES[request.param]):
        yield request.param


def MLP(dtype=torch.float64):
    return fusible.Sequential(ops.LayerNorm(64), ops.Linear(64, 256), ops.GELU(), ops.Linear(256, 64)).to(dtype)


def SWI(dtype=torch.float64):
    return fusible.Sequential(ops.RMSNorm(64), ops.Linear(64, 256), ops.SwiGLU(), ops.Linear(128, 64)).to(dtype)


def ref(block: nn.Module) -> nn.Sequential:
    """The plain twin with the same weights."""
    dtype = next((p.dtype for p in block.parameters()), torch.float64)
    twin = nn.Sequential(*[_twin(module) for module in block]).to(dtype)
    twin.load_state_dict(block.state_dict())
    return twin


def _twin(op: nn.Module) -> nn.Module:
    kind = type(op).__name__
    if kind == "SwiGLU":
        return SwiGLU()
    if kind in ("LayerNorm", "RMSNorm"):
        return getattr(nn, kind)(op.normalized_shape)
    if kind == "Linear":
        return nn.Linear(op.in_features, op.out_features, bias=op.bias is not None)
    return nn.Dropout(op.p) if kind == "Dropout" else getattr(nn, kind)()


def make_x(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*(shape or (8, 64)), dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def copy_of(x):
    return x.detach().clone().requires_grad_()


def agree(mine, theirs, what="", limit=None):
    assert (mine is None) == (theirs is None), what
    if theirs is not None:
        assert mine.shape == theirs.shape, what
        scale = max(theirs.abs().max().item(), 1e-2) if theirs.numel() else 1
        gap = (mine.double() - theirs.double()).abs().max().item() if theirs.numel() else 0
        assert gap <= (limit or LIMIT[theirs.dtype]) * scale, f"{what}: off by {gap:.3g} of {scale:.3g}"


def same_parameters(block, twin, grads=True):
    for (name, mine), (_, theirs) in zip(block.named_parameters(), twin.named_parameters(), strict=True):
        agree(mine.detach(), theirs.detach(), name)
        if grads:
            agree(mine.grad, theirs.grad, f"gradient of {name}")


def same_as_ref(block, x, loss=lambda y: (y * y).sum()):
    """Output, gradient of x and of every parameter."""
    twin, x2 = ref(block), copy_of(x)
    x = copy_of(x)
    y, y2 = block(x), twin(x2)
    agree(y.detach(), y2.detach(), "output")
    loss(y).backward()
    loss(y2).backward()
    agree(x.grad, x2.grad, "gradient of x")
    same_parameters(block, twin)


@pytest.mark.quick
def test_B001_liger_272_input_of_an_earlier_softmax_stays():
    block = fusible.Sequential(ops.SwiGLU(), ops.Linear(128, 8)).double()
    twin = nn.Sequential(SwiGLU(), nn.Linear(128, 8)).double()
    twin.load_state_dict(block.state_dict())
    a = make_x(4, 256)
    grads = []
    for module in (twin, block):
        a.grad = None
        h = torch.softmax(a, -1)
        h0 = h.detach().clone()
        version = h._version
        y = module(h)
        assert torch.equal(h, h0)
        y.square().sum().backward()
        assert torch.equal(h, h0)
        assert h._version == version
        grads.append(a.grad)
    agree(grads[1], grads[0])


def test_B002_unsloth_4533_norm_weights_train():
    block = SWI()
    twin, start = ref(block), [p.detach().clone() for p in block.parameters()]
    for module in (twin, block):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            module(make_x(seed=step)).square().mean().backward()
            assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())
            optimizer.step()
    same_parameters(block, twin)
    assert not any(torch.equal(p, old) for p, old in zip(block.parameters(), start, strict=True))


def test_B003_torch_194719_gradient_of_a_cat():
    blocks = [MLP(), MLP()]
    twins = [ref(block) for block in blocks]
    noise = torch.randn(8, 128, dtype=torch.float64)
    results = []
    for modules in (twins, blocks):
        xs = [make_x(seed=1), make_x(seed=2)]
        y = torch.cat([module(x) for module, x in zip(modules, xs, strict=True)], -1)
        (y * noise).sum().backward()
        results.append(xs)
    for mine, theirs in zip(results[1], results[0], strict=True):
        agree(mine.grad, theirs.grad)
    for block, twin in zip(blocks, twins, strict=True):
        same_parameters(block, twin)


def test_B004_te_2750_nothing_kept_lives_after_backward():
    block = MLP()
    y = block(make_x())
    y.sum().backward()
    node = y.grad_fn
    gc.collect()
    kept = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape in ((8, 256), (256, 8))]
    assert kept == []
    assert reachable(node, (8, 256)) == []


def reachable(start, shape):
    """Tensors of a shape that can be reached through attributes and containers, modules and plans aside."""
    seen, queue, found = set(), [start], []
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, (type, nn.Module, str, int, float)) or callable(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found += [thing] if thing.shape == shape else []
        elif isinstance(thing, dict):
            queue.extend(thing.values())
        elif isinstance(thing, (list, tuple)):
            queue.extend(thing)
        else:
            queue.extend(getattr(thing, "__dict__", {}).values())
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_B005_xformers_1126_checkpoint(reentrant):
    block, x = SWI(), make_x()
    block(x).sum().backward()
    want = [x.grad, *[p.grad for p in block.parameters()]]
    block.zero_grad()
    x = copy_of(x)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    for mine, theirs in zip([x.grad, *[p.grad for p in block.parameters()]], want, strict=True):
        assert torch.equal(mine, theirs)


def test_B006_apex_1379_norm_under_autocast():
    """The norm returns its input's dtype, which autocast has made bfloat16; torch's own layer norm returns float32."""
    block = fusible.Sequential(ops.Linear(64, 64), ops.LayerNorm(64))
    twin, x = ref(block), make_x(dtype=torch.float32)
    weights, grads = torch.randn(8, 64), []
    for module in (twin, block):
        x1 = copy_of(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x1)
        (y.float() * weights).sum().backward()
        grads.append([x1.grad, *[p.grad for p in module.parameters()], y.detach().float()])
    assert y.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in block.parameters())
    for mine, theirs in zip(grads[1], grads[0], strict=True):
        agree(mine, theirs, limit=2e-2)


def test_B007_megatron_6132_hooks_added_after_the_first_call():
    block, x, calls = MLP(), make_x(), []
    want = block(x)
    for number in (1, 2):
        handle = block[1].register_forward_pre_hook(lambda *a, number=number: calls.append(number))
        agree(block(x).detach(), want.detach())
        handle.remove()
        block(x)
    assert calls == [1, 2]
    handle = block[3].register_forward_hook(lambda module, args, y: y * 2)
    agree(block(x).detach(), 2 * want.detach())
    handle.remove()
    agree(block(x).detach(), want.detach())


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
@pytest.mark.parametrize("make", [MLP, SWI])
def test_B008_te_648_no_rows(make, shape):
    block, x = make(), make_x(*shape)
    y = block(x)
    y.sum().backward()
    assert y.shape == shape
    assert x.grad.shape == shape
    for parameter in block.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.quick
@pytest.mark.parametrize("make", [MLP, SWI])
def test_B009_torch_76185_double_backward(make):
    block = make()
    twin = ref(block)
    xs = []
    for module in (twin, block):
        xs.append(x := make_x())
        (g,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
    agree(xs[1].grad, xs[0].grad)
    same_parameters(block, twin)


@pytest.mark.quick
def test_B010_te_199_plain_state_dict():
    block = MLP()
    twin = ref(block)
    assert list(block.state_dict()) == list(twin.state_dict())
    for parameter in twin.parameters():
        nn.init.normal_(parameter)
    block.load_state_dict(twin.state_dict(), strict=True)
    agree(block(make_x()).detach(), twin(make_x()).detach())


@pytest.mark.quick
@pytest.mark.parametrize("used", ["both", "out", "res"])
def test_B011_quack_53_B012_liger_1068_residual_and_norm(used):
    block = fusible.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(64)).double()
    norm = nn.RMSNorm(64).double()
    a, b = torch.randn(8, 64, dtype=torch.float64), torch.randn(8, 64, dtype=torch.float64)

    def twin(x, r):
        h = x + r
        return norm(h), h

    grads = []
    for module in (twin, block):
        x, r = make_x(seed=1), make_x(seed=2)
        out, res = module(x, r)
        terms = {"out": (out * a).sum(), "res": (res * b).sum()}
        (terms["out"] + terms["res"] if used == "both" else terms[used]).backward()
        grads.append((x.grad, r.grad))
    agree(grads[1][0], grads[0][0])
    agree(grads[1][1], grads[1][0])
    agree(block[2].weight.grad, norm.weight.grad)


@pytest.mark.quick
@pytest.mark.parametrize("make", [SWI, lambda: fusible.Sequential(ops.RMSNorm(64)).double(), MLP])
def test_B013_liger_1305_incoming_gradient_stays(make):
    g, x = torch.randn(8, 64, dtype=torch.float64), make_x()
    g0 = g.clone()
    make()(x).backward(g)
    assert torch.equal(g, g0)
    assert x.grad.data_ptr() != g.data_ptr()


@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_B015_burn_5607_variance_of_rows_with_a_large_mean(kind, mean):
    x = (mean + 1e-3 * torch.arange(16.0)).repeat(4, 1)
    y = fusible.Sequential(getattr(ops, kind)(16))(x)
    plain = getattr(nn, kind)(16)
    exact = copy.deepcopy(plain).double()(x.double())
    assert (y - exact).abs().max() <= 2 * (plain(x) - exact).abs().max() + 1e-7
    assert not y.isnan().any()


@pytest.mark.quick
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_B016_te_2919_no_grad_and_a_non_leaf(mode):
    x = make_x()
    for block in (fusible.Sequential(ops.Identity(), ops.MakeExtraOutput()), MLP()):
        h = x * 2
        node = h.grad_fn
        with mode():
            outs = block(h)
        for out in outs if isinstance(outs, tuple) else (outs,):
            assert not out.requires_grad
            assert out is not h
        assert h.requires_grad
        assert h.grad_fn is node


def test_B017_torch_180642_compiled():
    block = MLP()
    compiled, grads = torch.compile(block, backend="aot_eager"), []
    for module in (block, compiled):
        block.zero_grad()
        x = make_x()
        module(x).square().sum().backward()
        grads.append([x.grad, *[p.grad for p in block.parameters()]])
    for mine, theirs in zip(*grads, strict=True):
        agree(mine, theirs)


def test_B018_torch_54580_deepcopy_and_pickle_after_a_call():
    block, x = MLP(), make_x()
    block(x).sum()
    copied, pickled = copy.deepcopy(block), pickle.loads(pickle.dumps(block))
    want = block(x).detach()
    agree(copied(x).detach(), want)
    agree(pickled(x).detach(), want)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied(x).square().sum().backward()
    optimizer.step()
    agree(block(x).detach(), want)
    assert all(p.grad is None for p in block.parameters())
    assert (copied(x) - want).abs().max() > 1e-3


def test_B019_apex_1449_dropout_in_eval():
    block, x = fusible.Sequential(ops.Linear(64, 64), ops.Dropout(0.5)).double(), make_x()
    block(x)
    block.eval()
    assert torch.equal(block(x), block(x))
    assert torch.equal(block(x), fusible.Sequential(block[0])(x))
    block.train()
    zeros = (block(x) == 0).double().mean()
    assert 0.3 < zeros < 0.7
    block[1].eval()  # the op's own flag counts, not the block's
    assert not (block(x) == 0).any()


@pytest.mark.parametrize("split", [False, True])
def test_B020_megatron_4318_bias_counts_once(split):
    block = MLP()
    if split:
        middle = [ops.Linear(64, 256, bias=False), ops.Bias(256)]
        block = fusible.Sequential(ops.LayerNorm(64), *middle, ops.GELU(), ops.Linear(256, 64)).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    twin = MLP()
    twin.load_state_dict(dict(zip(twin.state_dict(), block.state_dict().values(), strict=True)))
    twin = ref(twin)
    xs = []
    for module in (twin, block):
        xs.append(x := make_x())
        y = module(x)
        y.square().sum().backward()
    agree(xs[1].grad, xs[0].grad)
    same_parameters(block, twin)


LAYOUTS = {
    "permuted": lambda: torch.randn(64, 4, 8, dtype=torch.float64).permute(1, 2, 0),
    "every other": lambda: torch.randn(4, 16, 64, dtype=torch.float64)[:, ::2],
    "expanded": lambda: torch.randn(1, 1, 64, dtype=torch.float64).expand(4, 8, 64),
    "sliced": lambda: torch.randn(4, 8, 128, dtype=torch.float64)[..., 64:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [MLP, SWI])
def test_B021_te_1017_strided_input(make, layout):
    torch.manual_seed(1)
    x, block = LAYOUTS[layout](), make()
    twin = ref(block)
    grads = []
    for module, value in ((twin, x), (block, x), (block, x.contiguous())):
        module.zero_grad()
        leaf = value.detach().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        grads.append([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]])
    for a, b, c in zip(*grads, strict=True):
        agree(b, a)
        agree(c, a)


ALONE = ["LayerNorm(64)", "RMSNorm(64)", "Linear(64, 8)", "BasicLinear(64, 8)", "Bias(64)", "L2Normalization()",
         "GELU()",
         "QGELU()", "ReLU()", "SReLU()", "SiLU()", "Sigmoid()", "Tanh()", "SwiGLU()", "GEGLU()", "QGEGLU()", "ReGLU()",
         "SReGLU()", "GLU()", "ClampedSwiGLU()", "SiTUGLU()", "Dropout(0.5)", "ConstantScale(2.0)", "Identity()",
         "Reshape((4, -1))", "SwiGLU(interleave=4)"]  # fmt: skip


@pytest.mark.parametrize("op", [*ALONE, "MLP"])
def test_B022_rocm_te_623_gradient_with_stride_zero(op):
    block = MLP() if op == "MLP" else fusible.Sequential(eval(f"ops.{op}")).double()
    grads = []
    for expanded in (True, False):
        block.zero_grad()
        torch.manual_seed(3)
        x = make_x()
        y = block(x)
        y.sum().backward() if expanded else y.backward(torch.ones_like(y))
        grads.append([x.grad, *[p.grad for p in block.parameters()]])
    for mine, theirs in zip(*grads, strict=True):
        agree(mine, theirs)
        assert mine.isfinite().all()


def test_B023_flash_linear_attention_1071_gate_near_zero():
    block = SWI()
    with torch.no_grad():
        block[1].weight[:128] *= 0.01
    same_as_ref(block, make_x())


@pytest.mark.quick
def test_B024_te_2899_no_attributes_on_anybody():
    x, block = make_x(), MLP()
    x2 = x.clone()
    y = block(x2)
    y.sum().backward()
    for tensor in (x, x2, y, *block.parameters()):
        assert vars(tensor) == {}


class Reductions(TorchDispatchMode):
    """Counts calls and lists the shapes of what they return."""

    def __init__(self):
        super().__init__()
        self.calls, self.shapes = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.shapes += [tuple(t.shape) for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t)]
        return out


@pytest.mark.parametrize("make", [MLP, SWI])
def test_B025_liger_1067_frozen_norm_costs_nothing(make):
    counted = []
    for frozen in (False, True):
        block = make()
        block[0].requires_grad_(not frozen)
        block[1].requires_grad_(False)
        block[3].requires_grad_(False)
        y = block(make_x())
        loss = y.sum()
        with Reductions() as mode:
            loss.backward()
        counted.append(mode)
        assert all((p.grad is None) == frozen for p in block[0].parameters())
    assert counted[1].calls < counted[0].calls
    assert (64,) in counted[0].shapes
    assert (64,) not in counted[1].shapes


def test_B026_torchao_4616_backward_outside_autocast():
    block = MLP(torch.float32)
    grads = []
    for nested in (contextlib.nullcontext, lambda: torch.autocast("cpu", enabled=False),
                   lambda: torch.autocast("cpu", torch.bfloat16)):  # fmt: skip
        block.zero_grad()
        x = make_x(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = block(x)
        with nested():
            y.float().square().sum().backward()
        grads.append([x.grad, *[p.grad for p in block.parameters()]])
    for one, two, three in zip(*grads, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_B027_mamba_239_per_sample_gradients():
    block = MLP()
    params = {name: p.detach() for name, p in block.named_parameters()}
    xs = make_x(5, 64).detach()

    def loss(params, xi):
        return torch.func.functional_call(block, params, (xi,)).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, xs)
    for place, xi in enumerate(xs):
        block.zero_grad()
        block(xi).square().sum().backward()
        for name, parameter in block.named_parameters():
            agree(got[name][place], parameter.grad, name)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_B028_torch_132700_hooks_in_eval_without_gradients(training, mode):
    block, calls = MLP().train(training), []
    block[2].register_forward_hook(lambda *a: calls.append(1))
    with mode():
        block(make_x())
        block(make_x())
    assert len(calls) == 2


@pytest.mark.parametrize("width", [1, 3, 63, 65])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_B029_attorch_18_odd_rows(kind, width):
    for rows in (1, 2, 3, 5, 7, 127, 1025):
        block = fusible.Sequential(getattr(ops, kind)(width)).double()
        weights = torch.randn(rows, width, dtype=torch.float64)
        same_as_ref(block, make_x(rows, width, seed=rows), lambda y, w=weights: (y * w).sum())


def test_B030_open_sora_850_without_triton(rules):
    if rules != "default":
        pytest.skip("one subprocess is enough")
    code = """
import sys
sys.modules["triton"] = None
import torch, fusible
from fusible import ops
block = fusible.Sequential(ops.LayerNorm(64), ops.Linear(64, 256), ops.GELU(), ops.Linear(256, 64))
block(torch.randn(8, 64)).sum().backward()
from fusible._info import info
assert "triton" in str(info()).lower()
"""
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (2, 3, 64), (64,)])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "L2Normalization"])
def test_B031_flaggems_5392_any_rank(kind, shape):
    weights = torch.randn(shape, dtype=torch.float64)
    if kind != "L2Normalization":
        same_as_ref(fusible.Sequential(getattr(ops, kind)(64)).double(), make_x(*shape), lambda y: (y * weights).sum())
        return
    x, x2 = make_x(*shape), make_x(*shape)
    (fusible.Sequential(ops.L2Normalization())(x) * weights).sum().backward()
    (x2 / (x2.square().sum(-1, keepdim=True) + 1e-6).sqrt() * weights).sum().backward()
    agree(x.grad, x2.grad)


ENDS = {
    "none": ([], True),
    "reshape": ([ops.Reshape((4, 128))], True),
    "identity": ([ops.Identity()], True),
    "make": ([ops.MakeExtraOutput()], False),
}


@pytest.mark.quick
@pytest.mark.parametrize("end", ENDS)
def test_B032_agilerl_585_adding_to_the_output(end):
    extra, allowed = ENDS[end]
    block = MLP() + fusible.Sequential(*extra)
    x, x2 = make_x(), make_x()
    outs = block(x)
    y = outs[0] if isinstance(outs, tuple) else outs
    delta = make_x(*y.shape, seed=5)
    if not allowed:
        with pytest.raises(RuntimeError, match="is a view"):
            y += delta
        return
    y += delta
    y.square().sum().backward()
    twin = ref(block[:4])
    delta2 = copy_of(delta)
    (twin(x2).view(y.shape) + delta2).square().sum().backward()
    agree(x.grad, x2.grad)
    agree(delta.grad, delta2.grad)
    same_parameters(block[:4], twin)


def test_B033_torch_5871_extra_input_that_is_no_leaf():
    block, leaf, x = (
        fusible.Sequential(ops.Linear(64, 64), ops.AddExtraInput()).double(),
        make_x(seed=1),
        make_x(seed=2),
    )
    r = leaf * 2
    r0 = r.detach().clone()
    y = block(x, r)
    (y.sum() + r.square().sum()).backward()
    assert torch.equal(r, r0)
    agree(leaf.grad, 2 + 8 * leaf.detach())
    agree(x.grad, torch.ones(8, 64, dtype=torch.float64) @ block[0].weight.detach())


def test_B034_te_1063_each_parameter_once():
    block = MLP()
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert [name for name, _ in block.named_parameters(remove_duplicate=False)] == names
    assert list(block.state_dict()) == names
    assert sum(p.numel() for p in block.parameters()) == 64 + 64 + 64 * 256 + 256 + 256 * 64 + 64
    sizes = []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(block.state_dict(), file)
        sizes.append(len(file.getvalue()))
        file.seek(0)
        block = MLP()
        block.load_state_dict(torch.load(file))
        block(make_x()).sum().backward()
        block.zero_grad()
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_B035_unsloth_2434_first_call_in_inference_mode(first):
    block = MLP()
    with first():
        block(make_x())
    same_as_ref(block, make_x())


def test_B037_torch_133085_squares_beyond_half():
    x = (300 * torch.ones(4, 64) + torch.randn(4, 64)).half().requires_grad_()
    block = fusible.Sequential(ops.RMSNorm(64, dtype=torch.half))
    y = block(x)
    exact = F.rms_norm(x.detach().float(), (64,), eps=torch.finfo(torch.float32).eps)
    assert ((y.float() - exact).abs() <= 1e-3 * exact.abs()).all()
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert block[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_B038_olmo_core_828_the_same_mask_again(reentrant):
    block = fusible.Sequential(ops.Linear(64, 64), ops.Dropout(0.5), ops.Linear(64, 64)).double()
    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        block.zero_grad()
        torch.manual_seed(4)
        x = make_x()
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in block.parameters()]])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


class Unknown(Op):
    """Of a kind that no rule names."""

    def reference(self, x):
        return x.sin()


UNFUSED = {
    "hook": (lambda: _hooked(), "hooks, which must see it run"),
    "unknown op": (lambda: fusible.Sequential(ops.Linear(64, 64), Unknown(), ops.ReLU()), "no rule names"),
    "foreign module": (
        lambda: fusible.Sequential(ops.Linear(64, 64), nn.Softsign(), ops.ReLU()),
        "Softsign is not an op",
    ),
}


def _hooked():
    block = MLP()
    block[2].register_forward_hook(lambda *a: None)
    return block


@pytest.mark.parametrize("what", UNFUSED)
def test_B040_megatron_4636_the_report_says_why(what):
    make, reason = UNFUSED[what]
    block = make().double()
    x = make_x()
    with fusible.use_rules(fusible.rules.DEFAULT):
        assert reason in str(block.explain(x))
        with pytest.raises(RuntimeError, match=reason):
            block.explain(x, strict=True)


def test_B040_megatron_4636_an_identity_between_two_ops_does_not_part_them(rules):
    block, x = fusible.Sequential(ops.Linear(64, 64), nn.Identity(), ops.ReLU()).double(), make_x()
    assert ("linear_activation" in str(block.explain(x))) == (rules == "default")
    agree(block(x).detach(), torch.relu(F.linear(x, block[0].weight, block[0].bias)).detach())
