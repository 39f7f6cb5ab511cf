"""G5 to G8: what a backward pass computes, keeps and hands to hooks, once, again, and differentiated."""

from __future__ import annotations

import collections
import contextlib

import pytest
import torch
from test_gradient_changes import Pair, weighted
from test_gradient_rules import values
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from twins import CASES, RULES, cases, close, tuple_of

import fusible
from fusible import Grads, Op, Out, ops

both_rules = pytest.mark.parametrize("rules", RULES)
every_case = pytest.mark.parametrize("case", cases("residual", "make"))


class Calls(TorchDispatchMode):
    """Counts aten calls, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ("detach", "view", "t", "transpose", "alias", "_unsafe_view", "expand", "as_strided"):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def leaves_of(run) -> list[Tensor]:
    return [t for t in (*run.leaves, *run.module.parameters()) if t is not None and t.requires_grad]


def same(mine, theirs, what="gradient") -> None:
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        close(a, b, f"{what} {number}")


# -- double backward ---------------------------------------------------------------------------------------------------


def second(run, order: int) -> list[Tensor | None]:
    """The leaves' gradients of a sum over all derivatives up to this order."""
    leaves = leaves_of(run)
    seeds = [values(10 + place).view(out.shape).requires_grad_() for place, out in enumerate(run.outs)]
    pairs = [(out, seed) for out, seed in zip(run.outs, seeds, strict=True) if out.requires_grad]
    if not pairs:
        return []
    outs, seeds_ = zip(*pairs, strict=True)
    found = torch.autograd.grad(outs, leaves, seeds_, create_graph=True, allow_unused=True)
    for _ in range(order - 2):
        found = torch.autograd.grad(squares(found, leaves), leaves, create_graph=True, allow_unused=True)
    (squares(found, leaves) + weighted(run.outs)).backward()
    return [leaf.grad for leaf in leaves] + [seed.grad for seed in seeds]


def squares(*groups) -> Tensor:
    return torch.stack([(t * t).sum() for group in groups for t in group if t is not None]).sum()


@both_rules
@every_case
def test_double_backward(case, rules):
    pair = Pair(case, rules)
    for kind in ("leaf", "non-leaf", "plain"):
        for frozen in (set(), {0} if pair.start else set()):
            for order in (2, 3):
                same(
                    *[second(pair.run(kind, frozen, twin), order) for twin in (False, True)], f"{kind} {order} {frozen}"
                )


@both_rules
@pytest.mark.parametrize("what", ["input", "parameter"])
def test_double_backward_of_a_changed_tensor_raises(what, rules):
    """GELU's derivatives read x, the linear layer's the weight; what a double backward reads may not have changed."""
    block, _ = CASES["extra in"].make(RULES[rules])
    x, extra = values(0).requires_grad_(), values(1).requires_grad_()
    y = block(x, extra)
    (extra if what == "input" else next(block.parameters())).detach().mul_(2)
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Noise(Op):
    """Draws random numbers that it does not record."""

    def reference(self, x):
        return x * torch.rand_like(x)


class OwnNoise(Op):
    """As `Noise`, from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def reference(self, x):
        return x * torch.rand(x.shape, dtype=x.dtype, generator=self.generator)


class NoiseWithKernels(Noise):
    """Records its mask, but does not replay it."""

    class Saved(fusible.Saved):
        mask: Tensor

    def fwd(self, x):
        mask = torch.rand_like(x)
        return Out(x * mask, saved=NoiseWithKernels.Saved(mask))

    def bwd(self, saved, dy):
        return Grads(dy * saved.mask)


@pytest.mark.parametrize("kind", [Noise, OwnNoise, NoiseWithKernels])
def test_double_backward_through_unrecorded_random_numbers_raises(kind):
    x = values(0).requires_grad_()
    with pytest.raises(RuntimeError, match="random numbers"):
        torch.autograd.grad(fusible.Sequential(kind())(x).sum(), x, create_graph=True)


def test_first_backward_through_random_numbers_is_right():
    """Also on the first call, whose shapes are found by running the formula on fake tensors."""
    block = fusible.Sequential(ops.Linear(8, 8), Noise()).double()
    x = values(0).requires_grad_()
    state = torch.get_rng_state()
    y = block(x)
    torch.set_rng_state(state)
    mask = torch.rand(3, 8, dtype=torch.float64)
    y.sum().backward()
    assert torch.allclose(x.grad, mask @ block[0].weight)


# -- once more ---------------------------------------------------------------------------------------------------------


@both_rules
@every_case
def test_retained_graph_and_accumulation(case, rules):
    """Backward twice with `retain_graph`, then a second forward and backward on top: three times the gradient."""
    pair = Pair(case, rules)
    for kind in ("leaf", "plain"):
        results = []
        for twin in (False, True):
            run = pair.run(kind, set(), twin)
            loss = weighted(run.outs)
            if loss.requires_grad:
                loss.backward(retain_graph=True)
                loss.backward()
                torch.manual_seed(7)
                weighted(tuple_of(run.module(*run.given))).backward()
            results.append(run.grads())
        same(*results)


@both_rules
@every_case
def test_second_backward_without_retain(case, rules):
    """Raises where the twin raises."""
    pair = Pair(case, rules)
    raised = []
    for twin in (False, True):
        run = pair.run("leaf", set(), twin)
        douts = [torch.ones_like(out) for out in run.outs]  # a loss of many products would keep something itself
        torch.autograd.backward(run.outs, douts)
        try:
            torch.autograd.backward(run.outs, douts)
            raised.append(False)
        except RuntimeError as error:
            assert "second time" in str(error)
            raised.append(True)
    assert raised[0] == raised[1]


@both_rules
@every_case
def test_inside_no_grad_and_anomaly_mode_and_by_subsets(case, rules):
    """`backward()` under `no_grad`, with anomaly detection, and `autograd.grad` of each leaf alone."""
    pair = Pair(case, rules)
    results = []
    for twin in (False, True):
        run = pair.run("leaf", set(), twin)
        loss = weighted(run.outs)
        with torch.no_grad():
            loss.backward(retain_graph=True)
        leaves = leaves_of(run)
        alone = [torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0] for leaf in leaves]
        with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
            run = pair.run("leaf", set(), twin)
            weighted(run.outs).backward(inputs=leaves_of(run)[:1])
        results.append([*[leaf.grad for leaf in leaves], *alone, leaves_of(run)[0].grad])
    same(*results)


# -- what it costs -----------------------------------------------------------------------------------------------------


def backward_calls(modules, pick=lambda outs: outs, x_wants: bool = True, rules=None, frozen=()) -> collections.Counter:
    block = fusible.Sequential(*modules, rules=rules).double()
    for place in frozen:
        list(block.parameters())[place].requires_grad_(False)
    outs = pick(tuple_of(block(values(0).requires_grad_(x_wants))))
    douts = [torch.ones_like(out) for out in outs]
    with Calls() as calls, fusible.kernels.use("reference"):  # a kernel of our own is one call, whatever it does
        torch.autograd.backward(outs, douts)
    return calls.names


@both_rules
@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_output_costs_nothing(used, rules):
    def first():
        return [ops.RMSNorm(8), ops.Linear(8, 8)]

    def rest():
        return [ops.GELU(), ops.Linear(8, 8)]

    modules = [*first(), ops.MakeExtraOutput(), *rest()]
    got = backward_calls(modules, lambda outs: outs[used : used + 1], rules=RULES[rules])
    alone = backward_calls(first() if used else [*first(), *rest()], rules=RULES[rules])
    assert got == alone


@both_rules
def test_frozen_parameters_and_inputs_cost_nothing(rules):
    def calls(**options):
        modules = [ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8)]
        return backward_calls(modules, rules=RULES[rules], **options)

    every = calls()
    assert every["mm"] + every["matmul"] == 4
    assert every["native_layer_norm_backward"] == 1
    products = {
        "weight of the first linear": (calls(frozen=[2]), 3),
        "both weights": (calls(frozen=[2, 4]), 2),
        "x alone": (calls(x_wants=False), 4),
        "x and the norm": (calls(x_wants=False, frozen=[0, 1]), 3),
        "all but the last bias": (calls(x_wants=False, frozen=[0, 1, 2, 3, 4]), 0),
        "all but the first linear's bias": (calls(x_wants=False, frozen=[0, 1, 2, 4, 5]), 1),
    }
    for what, (names, count) in products.items():
        assert names["mm"] + names["matmul"] == count, what
    assert calls(frozen=[3])["sum"] == every["sum"] - 1
    assert products["x and the norm"][0]["native_layer_norm_backward"] == 0
    assert products["all but the last bias"][0] == {"sum": 1}


@both_rules
@every_case
def test_what_is_packed_is_read(case, rules):
    """Saved-tensor hooks see exactly what backward reads, and no more bytes than the twin keeps, statistics aside."""
    statistics = 2 * 3 * 8  # two numbers per row: the twin's RMSNorm keeps x normalised, ours x and the factor
    pair = Pair(case, rules)
    for kind in ("leaf", "plain"):
        for frozen in ({}, {0}, {1}, set(range(1, 9))):
            frozen = {place for place in frozen if place < len(pair.start)}
            packed, wanted = packed_by(pair, kind, frozen)
            for place in range(len(packed)):
                _, got = packed_by(pair, kind, frozen, spoiled=place)
                changed = any(a is not None and not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
                assert changed, f"{kind}, frozen {frozen}: {list(packed[place].shape)} is packed, and not read"
            theirs, _ = packed_by(pair, kind, frozen, twin=True)
            assert total(packed) <= total(theirs) + statistics, f"{kind}, frozen {frozen}"


def packed_by(pair: Pair, kind: str, frozen, spoiled: int | None = None, twin: bool = False):
    packed: list[Tensor] = []

    def pack(tensor):
        packed.append(tensor.detach())
        return len(packed) - 1, tensor

    def unpack(entry):
        place, tensor = entry
        if place != spoiled:
            return tensor
        return ~tensor if tensor.dtype is torch.bool else tensor.detach() * -2 - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run = pair.run(kind, frozen, twin)
    run.backward(weighted(run.outs))
    return packed, run.grads()


def total(tensors) -> int:
    """Bytes of distinct memory."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@both_rules
@every_case
def test_nothing_is_kept_when_nothing_requires_grad(case, rules):
    pair = Pair(case, rules)
    packed, _ = packed_by(pair, "plain", set(range(len(pair.start))))
    assert not packed


# -- hooks, offloading, checkpoints ------------------------------------------------------------------------------------


def gradients_under(context, block, twice: bool = False, **options):
    x = values(0).requires_grad_()
    for parameter in block.parameters():
        parameter.grad = None
    torch.manual_seed(7)
    with context():
        y = checkpoint(block, x, **options) if options else block(x)
    weighted(tuple_of(y)).backward()
    return [x.grad, *[p.grad for p in block.parameters()]]


CHECKPOINTED = [case for case in CASES if not CASES[case].extras]


@both_rules
@pytest.mark.parametrize("case", CHECKPOINTED)
def test_offloading_and_checkpoints_change_no_bit(case, rules):
    block, _ = CASES[case].make(RULES[rules])
    plain = gradients_under(contextlib.nullcontext, block)
    others = {
        "save_on_cpu": gradients_under(torch.autograd.graph.save_on_cpu, block),
        "reentrant": gradients_under(contextlib.nullcontext, block, use_reentrant=True),
        "non-reentrant": gradients_under(contextlib.nullcontext, block, use_reentrant=False),
        "without early stop": gradients_under(lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False), block,
                                              use_reentrant=False),
    }  # fmt: skip
    for name, grads in others.items():
        for a, b in zip(grads, plain, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), name


@both_rules
@every_case
def test_hooks_on_tensors_parameters_and_the_block(case, rules):
    """Tensor hooks, retained gradients, post-accumulate hooks, node hooks, full backward hooks on the block."""
    pair = Pair(case, rules)
    logs = []
    for twin in (False, True):
        module, log = (pair.twin if twin else pair.block), []
        handles = [
            module.register_full_backward_pre_hook(lambda m, grads, log=log: log.extend(grads)),
            module.register_full_backward_hook(lambda m, gin, gout, log=log: log.extend([*gin, *gout])),
            *[
                p.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
                for p in module.parameters()
            ],
        ]
        run = pair.run("non-leaf", set(), twin)
        for tensor in (*run.given, *run.outs):
            tensor.register_hook(lambda grad: grad * 2)
            tensor.retain_grad()
        run.backward(weighted(run.outs))
        for handle in handles:
            handle.remove()
        kept = [t.grad for t in (*run.given, *run.outs)]
        logs.append([sorted_by_size(log), kept + run.grads()])
    same(logs[0][0], logs[1][0], "seen by a hook")
    same(logs[0][1], logs[1][1])


def sorted_by_size(tensors) -> list[Tensor]:
    """Hooks of parameters fire in an order of their own."""
    there = [t.detach().clone() for t in tensors if t is not None]
    return sorted(there, key=lambda t: (t.numel(), t.sum().item()))


@both_rules
def test_hooks_on_the_node(rules):
    block, _ = CASES["mlp"].make(RULES[rules])
    y = block(values(0))
    seen = []
    y.grad_fn.register_prehook(lambda grads: seen.append(len(grads)))
    y.grad_fn.register_hook(lambda gin, gout: seen.append(len(gout)))
    y.sum().backward()
    assert seen == [1, 1]
