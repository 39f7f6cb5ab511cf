"""`fuse` and `unfuse` on models of `torch.nn`: the model stays what it is, changes are seen, all is undone."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fusible
from fusible import adapting, fused, ops

pytestmark = pytest.mark.quick


class Norm(nn.Module):
    """Attention's place: anything that is no op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return torch.softmax(self.proj(x), -1) * scale


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.act = nn.SiLU()
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attn = Norm(width)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x, scale=1.0):
        h = x + self.attn(self.norm1(x), scale=scale)
        return h + self.mlp(self.norm2(h))


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4), nn.Softmax(-1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def adapters(monkeypatch):
    """Adapters for the classes of this file, taken away again."""
    adapting.find(Block)  # loads those that are shipped
    monkeypatch.setattr(adapting, "_ADAPTERS", dict(adapting._ADAPTERS))

    @fusible.adapter(Mlp)
    def mlp(module, chain):
        return chain(chain.gated(module.gate, module.act, module.up), module.down)

    @fusible.adapter(Block)
    def block(module, chain):
        start = chain(module.norm1)
        rest = chain(ops.AddExtraInput(), chain.residual(module.norm2, module.mlp))
        return lambda x, scale=1.0: rest(module.attn(start(x), scale=scale), x)


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def data() -> torch.Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def nodes(tensor: torch.Tensor) -> set[str]:
    """Names of the autograd nodes behind a tensor."""
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return {node.name() for node in seen}


def is_fused(module: nn.Module) -> bool:
    """Whether a call of the module runs its chains."""
    return adapting.PLAIN in type(module).__dict__ and fused._fusion(module).forward is not None


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))]


def test_the_model_stays_what_it_is_and_computes_the_same():
    stock, m = model(), model()
    parameters, keys = list(m.named_parameters()), list(m.state_dict())
    names = [name for name, _ in m.named_modules()]
    before, shown = type(m.blocks[0]), repr(m)
    report = fusible.fuse(m)
    assert [row.path for row in report.fused] == ["blocks.0", "blocks.1", "head"]
    assert all(a is b for (_, a), (_, b) in zip(parameters, m.named_parameters(), strict=True))
    assert keys == list(m.state_dict())
    assert names == [name for name, _ in m.named_modules()]
    assert repr(m) == shown
    assert isinstance(m.blocks[0], before)
    assert type(m.blocks[0]).__name__ == "Block"
    assert type(m.blocks[0]) is type(m.blocks[1])
    torch.testing.assert_close(gradients(m, data()), gradients(stock, data()), rtol=1e-12, atol=1e-12)
    assert "FusedBackward" in nodes(m(data()))
    assert "FusedBackward" not in nodes(stock(data()))


def test_other_instances_are_untouched():
    m, other = model(), model()
    fusible.fuse(m)
    assert type(other.blocks[0]) is Block
    assert "FusedBackward" not in nodes(other(data()))


def test_unfuse_gives_the_model_that_was():
    m = model()
    kinds = [type(inner) for inner in m.modules()]
    keys = [set(inner.__dict__) for inner in m.modules()]
    y = m(data())
    fusible.fuse(m)
    m(data()).sum().backward()
    assert fusible.unfuse(m) is m
    assert [type(inner) for inner in m.modules()] == kinds
    assert [set(inner.__dict__) for inner in m.modules()] == keys
    assert torch.equal(m(data()), y)
    assert fusible.unfuse(m) is m


def test_an_optimizer_made_before_stays_valid():
    stock, m = model(), model()
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (stock, m)]
    fusible.fuse(m)
    for _ in range(5):
        losses = []
        for each, optimizer in zip((stock, m), optimizers, strict=True):
            loss = each(data()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_copies_are_fused_and_their_own():
    m = model()
    fusible.fuse(m)
    y = m(data())
    twin = copy.deepcopy(m)
    assert torch.equal(twin(data()), y)
    assert is_fused(twin.blocks[0])
    with torch.no_grad():
        twin.blocks[0].mlp.down.weight.zero_()
    assert torch.equal(m(data()), y)
    assert not torch.equal(twin(data()), y)
    assert type(fusible.unfuse(twin).blocks[0]) is Block
    assert is_fused(m.blocks[0])


def test_a_shared_child_stays_shared_in_a_copy():
    m = model()
    m.again = m.blocks[0]
    fusible.fuse(m)
    twin = copy.deepcopy(m)
    assert twin.again is twin.blocks[0]
    assert twin.again is not m.again


def test_pickles_are_the_plain_module():
    m = model()
    fusible.fuse(m)
    y = m(data())
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        back = pickle.loads(pickle.dumps(m, protocol))
        assert type(back.blocks[0]) is Block
        assert set(back.blocks[0].__dict__) == set(Block().__dict__)
        torch.testing.assert_close(back(data()), y)
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False).blocks[0]) is Block
    assert b"fusible" not in file.getvalue()
    assert is_fused(m.blocks[0])


def test_a_shallow_copy_is_the_plain_module():
    m = model()
    fusible.fuse(m)
    assert type(copy.copy(m.blocks[0])) is Block


def test_state_dicts_load_both_ways():
    stock, m = model(), model()
    fusible.fuse(m)
    with torch.no_grad():
        for parameter in m.parameters():
            parameter.add_(0.1)
    stock.load_state_dict(m.state_dict())
    torch.testing.assert_close(stock(data()), m(data()))
    m.load_state_dict(model().state_dict(), assign=True)
    torch.testing.assert_close(model()(data()), m(data()))
    assert is_fused(m.blocks[0])


HOOKS = {
    "forward": lambda module, see: module.register_forward_hook(lambda *_: see()),
    "pre": lambda module, see: module.register_forward_pre_hook(lambda *_: see()),
    "backward": lambda module, see: module.register_full_backward_hook(lambda *_: see()),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("place", ["norm1", "norm2", "mlp", "mlp.gate", "mlp.act", "mlp.down", "attn", "attn.proj", ""])
def test_hooks_added_at_any_time_are_seen(place, kind):
    m, seen = model(), []
    fusible.fuse(m)
    x = data().requires_grad_()
    y = m(x)
    handle = HOOKS[kind](m.blocks[0].get_submodule(place), lambda: seen.append(place))
    again = m(x)
    again.sum().backward()
    assert seen == [place]
    torch.testing.assert_close(again, y)
    fuses = place in ("attn", "attn.proj", "")
    assert is_fused(m.blocks[0]) is fuses
    assert is_fused(m.blocks[1])
    handle.remove()
    assert torch.equal(m(x), y)
    assert len(seen) == 1
    assert is_fused(m.blocks[0])


def test_hooks_there_before_leave_a_module_as_it_is():
    m, seen = model(), []
    m.blocks[0].mlp.up.register_forward_hook(lambda *_: seen.append(1))
    report = fusible.fuse(m)
    assert [(row.path, row.text) for row in report.declined] == [
        ("blocks.0", "up (Linear) has hooks, which must see it run"),
        ("blocks.0.mlp", "up (Linear) has hooks, which must see it run"),
    ]
    assert type(m.blocks[0]) is Block
    m(data())
    assert seen == [1]


def test_hooks_inside_a_sequential_run():
    m, seen = model(), []
    fusible.fuse(m)
    m.head[1].register_forward_hook(lambda module, args, out: seen.append(module))
    m(data())
    assert seen == [m.head[1]]


def test_global_hooks_see_every_module():
    m, seen = model(), []
    fusible.fuse(m)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        m(data())
    finally:
        handle.remove()
    assert m.blocks[0].mlp.gate in seen
    assert m.head[0] in seen


def test_a_replaced_forward_runs():
    m = model()
    fusible.fuse(m)
    m.blocks[0].mlp.forward = torch.zeros_like
    assert not is_fused(m.blocks[0])
    y = m.blocks[0](data())
    del m.blocks[0].mlp.forward
    assert is_fused(m.blocks[0])
    assert not torch.equal(m.blocks[0](data()), y)
    m.blocks[0].forward = torch.zeros_like
    assert not m.blocks[0](data()).any()


def test_a_replaced_child_runs():
    m = model()
    fusible.fuse(m)
    m(data())
    m.blocks[0].mlp.act = nn.Tanh()
    stock = model()
    stock.blocks[0].mlp.act = nn.Tanh()
    torch.testing.assert_close(m(data()), stock(data()))
    assert not is_fused(m.blocks[0])


def test_a_class_whose_forward_was_replaced_runs_it(monkeypatch):
    m = model()
    fusible.fuse(m)
    m(data())
    monkeypatch.setattr(Block, "forward", lambda self, x: x * 2)
    torch.testing.assert_close(m.blocks[0](data()), data() * 2, msg="the chains knew the old one")


def test_parametrizations_and_pruning_run_plainly():
    for change in (
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: parametrizations.spectral_norm(layer),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ):
        stock, m = model(), model()
        fusible.fuse(m)
        m(data())
        for each in (stock, m):
            torch.manual_seed(2)
            change(each.blocks[0].mlp.down)
        stock.eval()
        m.eval()
        torch.testing.assert_close(gradients(m, data()), gradients(stock, data()), rtol=1e-12, atol=1e-12)
        assert not is_fused(m.blocks[0])
        report = fusible.fuse(stock)
        assert any("down" in row.text or "Parametrized" in row.text for row in report.declined), str(report)


def test_a_parametrization_on_a_fused_module_keeps_unfuse_from_guessing():
    m = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    fusible.fuse(m)
    m.register_parameter("scale", nn.Parameter(torch.ones(())))
    nn.utils.parametrize.register_parametrization(m, "scale", nn.Tanh())
    with pytest.raises(RuntimeError, match="undo what changed its class before unfuse"):
        fusible.unfuse(m)
    nn.utils.parametrize.remove_parametrizations(m, "scale")


def test_replaced_and_tied_parameters():
    stock, m = model(), model()
    fusible.fuse(m)
    m(data())
    for each in (stock, m):
        each.blocks[0].mlp.up.weight = each.blocks[0].mlp.gate.weight
        each.blocks[1].norm1.weight = nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(gradients(m, data()), gradients(stock, data()), rtol=1e-12, atol=1e-12)
    assert is_fused(m.blocks[0])


def test_frozen_parameters_cost_no_gradient():
    stock, m = model(), model()
    fusible.fuse(m)
    for each in (stock, m):
        each.blocks[1].requires_grad_(False)
        each.blocks[0].mlp.gate.weight.requires_grad_(False)
        each(data()).square().sum().backward()
    for a, b in zip(stock.parameters(), m.parameters(), strict=True):
        assert (a.grad is None) is (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_one_module_used_twice():
    stock, m = model(), model()
    for each in (stock, m):
        each.blocks.append(each.blocks[0])
    report = fusible.fuse(m)
    assert [row.path for row in report.fused] == ["blocks.0", "blocks.1", "head"]
    torch.testing.assert_close(gradients(m, data()), gradients(stock, data()), rtol=1e-12, atol=1e-12)


def test_a_model_fused_in_part_is_completed():
    stock, m = model(), model()
    fusible.fuse(m.blocks[0].mlp)
    fusible.fuse(m.blocks[1])
    assert is_fused(m.blocks[0].mlp)
    report = fusible.fuse(m)
    assert [(row.path, row.text.startswith("fused before")) for row in report.fused] == [
        ("blocks.0", False), ("blocks.1", True), ("head", False),
    ]  # fmt: skip
    torch.testing.assert_close(gradients(m, data()), gradients(stock, data()), rtol=1e-12, atol=1e-12)
    assert "FusedBackward" in nodes(m.blocks[0](data()))
    fusible.unfuse(m)
    assert all(adapting.PLAIN not in type(inner).__dict__ for inner in m.modules())


class Sharded(nn.Parameter):
    """A parameter of another type, as sharding and quantization make them."""


def test_a_sharded_or_quantized_weight_leaves_a_module_as_it_is():
    m = model()
    m.blocks[0].mlp.up.weight = Sharded(m.blocks[0].mlp.up.weight.detach())
    report = fusible.fuse(m)
    assert [row.path for row in report.declined] == ["blocks.0", "blocks.0.mlp"]
    assert report.declined[0].text == "a parameter of up (Linear) is a Sharded"
    m.blocks[1].norm2.weight = Sharded(m.blocks[1].norm2.weight.detach())
    assert not is_fused(m.blocks[1])
    torch.testing.assert_close(m(data()), model()(data()))
    m.blocks[1].norm2.weight = nn.Parameter(m.blocks[1].norm2.weight.detach().as_subclass(torch.Tensor))
    assert is_fused(m.blocks[1])


def test_strict_gives_the_reason_and_leaves_the_model_untouched():
    unknown = nn.ModuleList([Norm(4)])
    with pytest.raises(
        ValueError, match=r"ModuleList was left as it is: no class in it has an adapter \(Norm, Linear\)"
    ):
        fusible.fuse(unknown, strict=True)
    m = model()
    m.blocks[1].mlp.act = nn.Softplus()
    keys = [set(inner.__dict__) for inner in m.modules()]
    with pytest.raises(ValueError, match=r"blocks\.1 \(Block\): Softplus is not an op of fusible and has no adapter"):
        fusible.fuse(m, strict=True)
    assert [set(inner.__dict__) for inner in m.modules()] == keys
    assert type(m.blocks[0]) is Block
    fusible.fuse(model(), strict=True)


def test_errors():
    with pytest.raises(TypeError, match=r"fusible\.fuse takes a torch\.nn\.Module, got 3 \(int\)"):
        fusible.fuse(3)
    with pytest.raises(TypeError, match="takes classes of torch.nn.Module or their dotted names, got 3"):
        fusible.adapter(3)
    with pytest.raises(ValueError, match="Model is not fused; fusible.fuse"):
        fusible.chains(model())

    @fusible.adapter(Norm)
    def foreign(module, chain):
        return chain(nn.Linear(8, 8))

    with pytest.raises(ValueError, match="Linear in a chain of Norm is no part of it; use its own modules"):
        fusible.fuse(model())


def test_an_adapter_for_other_code_declines():
    @fusible.adapter(Mlp, reads=("down", "act", "gate", "up", "dropout"))
    def mlp(module, chain):
        raise AssertionError("not to be called")

    report = fusible.fuse(model())
    assert report.declined[0].text == (
        "the forward of Mlp is not the one that its adapter knows; it differs in dropout"
    )

    @fusible.adapter(Mlp, needs=("torch", 99))
    def newer(module, chain):
        raise AssertionError("not to be called")

    report = fusible.fuse(model())
    assert report.declined[0].text.startswith("its adapter is for torch 99 or newer, this is ")


def test_an_mlp_that_is_no_chain_leaves_the_rest_fused():
    @fusible.adapter(Block)
    def block(module, chain):
        rest = chain.attempt(ops.AddExtraInput(), chain.residual(module.norm2, module.mlp))
        if rest is None:
            head = chain(ops.AddExtraInput(), ops.MakeExtraOutput(), module.norm2)

            def rest(attended, x):
                normal, h = head(attended, x)
                return h + module.mlp(normal)

        return lambda x, scale=1.0: rest(module.attn(module.norm1(x), scale=scale), x)

    stock, m = model(), model()
    for each in (stock, m):
        each.blocks[0].mlp.act = nn.Softplus()
    report = fusible.fuse(m)
    assert report.partial == [("blocks.0", "Block", "Softplus is not an op of fusible and has no adapter")]
    torch.testing.assert_close(gradients(m, data()), gradients(stock, data()), rtol=1e-12, atol=1e-12)
    m.blocks[0].mlp.act = nn.SiLU()
    torch.testing.assert_close(m(data()), model()(data()))
    assert "mlp.gate" in [name for name, inner in m.blocks[0].named_modules()
                          if id(inner) in m.blocks[0].__dict__["_fusible"].covered]  # fmt: skip


def test_a_replica_with_shared_attributes_uses_its_own_parameters():
    m = model().blocks[0]
    fusible.fuse(m)
    m(data())
    replica = type(m).__new__(type(m))
    replica.__dict__ = {**m.__dict__, "_modules": {name: copy.deepcopy(child) for name, child in m._modules.items()}}
    with torch.no_grad():
        replica.mlp.down.weight.zero_()
    assert not torch.equal(replica(data()), m(data()))
    torch.testing.assert_close(m(data()), model().blocks[0](data()))


def test_a_fused_model_is_freed():
    m = model()
    fusible.fuse(m)
    m(data())
    gone = weakref.ref(m.blocks[0])
    del m
    gc.collect()
    assert gone() is None


def test_transforms_see_plain_torch():
    m, x = model(), data()
    fusible.fuse(m)
    parameters = dict(m.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(m, parameters, (row.unsqueeze(0),)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    want = torch.autograd.grad(m(x[1:2]).square().sum(), m.blocks[0].mlp.gate.weight)[0]
    torch.testing.assert_close(per_sample["blocks.0.mlp.gate.weight"][1], want)
    other = {name: parameter * 2 for name, parameter in parameters.items()}
    stock = model()
    stock.load_state_dict(other)
    torch.testing.assert_close(torch.func.functional_call(m, other, (x,)), stock(x))


def test_a_sequential_stays_a_sequential():
    m = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softplus(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    fusible.fuse(m)
    assert len(m) == 4
    assert isinstance(m[:2], nn.Sequential)
    x = torch.randn(2, 8)
    torch.testing.assert_close(m[:2](x), nn.functional.gelu(m[0](x)))
    m.append(nn.Tanh())
    torch.testing.assert_close(m(x), m[4](m[3](m[2](m[1](m[0](x))))))
    assert "FusedBackward" in nodes(m(x))
    report = fusible.fuse(nn.Sequential(nn.Linear(8, 8), nn.Softplus()))
    assert report.declined[0].text == "no two neighbours in it are ops of fusible"


def test_the_report():
    m = model()
    m.blocks[1].mlp.act = nn.Softplus()
    report = fusible.fuse(m)
    assert (
        str(report)
        == """\
Model: 2 modules fused

fused
  blocks.0  Block       norm1, norm2, mlp
  head      Sequential  0, 1

not fused
  blocks.1      Block  Softplus is not an op of fusible and has no adapter
  blocks.1.mlp  Mlp    Softplus is not an op of fusible and has no adapter

run as they are, for want of an adapter: Linear x5, Model, Norm x2, RMSNorm x2, Softmax, Softplus"""
    )
    assert repr(report) == "<Model: 2 modules fused>"
    assert report.to_dict()["fused"][0] == {"path": "blocks.0", "kind": "Block", "text": "norm1, norm2, mlp"}


LAYERS = [
    ("encoder", {"norm_first": True}),
    ("encoder", {"norm_first": False, "activation": "gelu"}),
    ("encoder", {"norm_first": True, "batch_first": True, "activation": nn.GELU("tanh")}),
    ("decoder", {"norm_first": True}),
    ("decoder", {"norm_first": False, "batch_first": True, "activation": "gelu"}),
]


def layer_of(kind: str, options: dict) -> nn.Module:
    torch.manual_seed(0)
    make = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    return make(8, 2, 16, dtype=torch.float64, **{"dropout": 0.0, **options})


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_layers_of_transformers(kind, options):
    stock, m = layer_of(kind, options), layer_of(kind, options)
    assert [row.path for row in fusible.fuse(m, strict=True).fused] == ["the model"]
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    args = (x, mask) if kind == "encoder" else (x, torch.randn(4, 4, 8, dtype=torch.float64), mask)
    results = []
    for each in (stock, m):
        y = each(*args)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(each.parameters()))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    assert "FusedBackward" in nodes(m(*args))


def test_dropout_in_a_layer_draws_masks_and_evaluation_none():
    m = layer_of("encoder", {"norm_first": False, "dropout": 0.5})
    fusible.fuse(m)
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    assert not torch.equal(m(x), m(x))
    assert "FusedBackward" in nodes(m(x))
    m.eval()
    torch.testing.assert_close(m(x), layer_of("encoder", {"norm_first": False}).eval()(x))
    with fusible.kernels.use("reference"):
        m.train()
        m.dropout1.p = m.dropout2.p = 0.0
        stock = layer_of("encoder", {"norm_first": False, "dropout": 0.5}).train()
        stock.dropout1.p = stock.dropout2.p = 0.0
        results = []
        for each in (stock, m):
            torch.manual_seed(3)
            results.append(each(x))
    torch.testing.assert_close(*results)


def test_layers_keep_their_fast_path_of_inference(monkeypatch):
    m = nn.TransformerEncoder(layer_of("encoder", {"batch_first": True}), 2).eval()
    fusible.fuse(m)
    taken = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: taken.append(1) or fast(*args))
    with torch.no_grad():
        m(torch.randn(3, 4, 8, dtype=torch.float64))
    assert len(taken) == 2


def test_an_unknown_activation_leaves_a_layer_as_it_is():
    def squash(x):
        return x / (1 + x.abs())

    m = layer_of("encoder", {"activation": squash})
    report = fusible.fuse(m)
    assert report.declined[0].text == (
        "the activation squash is not a function that fusible knows; a torch.nn module may be"
    )
    m = layer_of("encoder", {})
    fusible.fuse(m)
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    m(x)
    m.activation = squash
    stock = layer_of("encoder", {"activation": squash})
    torch.testing.assert_close(m(x), stock(x))


def test_timm_mlps_are_known_by_their_form():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 16)
            self.act = nn.GELU()
            self.drop1 = nn.Dropout(0.0)
            self.norm = nn.Identity()
            self.fc2 = nn.Linear(16, 8)
            self.drop2 = nn.Dropout(0.0)

        def forward(self, x):
            x = self.drop1(self.act(self.fc1(x)))
            return self.drop2(self.fc2(self.norm(x)))

    m = Mlp()
    x = torch.randn(3, 8)
    y = m(x)
    assert fusible.fuse(m).fused
    torch.testing.assert_close(m(x), y)
    m.extra = nn.Identity()
    assert not is_fused(m)


def attending(**options) -> tuple[nn.Module, nn.Module]:
    stock, m = (layer_of("encoder", {"norm_first": True, "batch_first": True, **options}) for _ in range(2))
    fusible.fuse(m)
    return stock, m


def test_the_norm_before_attention_is_computed_again_and_not_kept():
    stock, m = attending(batch_first=False)
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    kept = []
    for each in (stock, m):
        found = []

        def note(tensor, found=found):
            found.append(tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss = each(x).square().sum()
        normal = each.norm1(x).flatten()
        kept.append([t for t in found if t.numel() == normal.numel() and torch.equal(t.flatten(), normal)])
        torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(each(x).square().sum(), x))
    assert [bool(found) for found in kept] == [True, False]


def test_what_attention_keeps_is_still_watched():
    _, m = attending()
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    for change in (m.norm1.weight, m.self_attn.in_proj_weight):
        y = m(x)
        with torch.no_grad():
            change.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    h = x * 1
    y = m(h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_norm_that_attention_writes_over_is_kept_as_it_was_read():
    stock, m = attending()

    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x, *args, **kwargs):
            return (self.proj(x.mul_(2)),)

    results = []
    torch.manual_seed(0)
    attention = Writing()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    for each in (stock, m):
        each.self_attn = attention
        results.append(torch.autograd.grad(each(x).square().sum(), [*attention.parameters(), each.norm1.weight]))
    torch.testing.assert_close(results[1], results[0])


def test_backward_twice_and_double_backward_through_the_norm_before_attention():
    stock, m = attending()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for each in (stock, m):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = each(x).square().sum()
            loss.backward(retain_graph=True)
            first = [parameter.grad.clone() for parameter in each.parameters()]
            loss.backward()
            (dx,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            dx.square().sum().backward()
        results.append([first, dx, [parameter.grad for parameter in each.parameters()]])
        each.zero_grad()
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_attention_with_a_forgotten_norm(reentrant):
    from torch.utils.checkpoint import checkpoint

    stock, m = attending()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(stock(x).square().sum(), list(stock.parameters()))
    checkpoint(m, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in m.parameters()], list(want))


def test_where_hooks_are_disabled_the_norm_is_kept():
    stock, m = attending()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        torch.testing.assert_close(m(x), stock(x))
