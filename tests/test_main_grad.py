"""Gradients added to `main_grad`: sums, errors, hooks, and what stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusible
from fusible import ops, segments

ON = {"accumulate_into_main_grad": True}
RULES = {"default": fusible.rules.DEFAULT, "none": fusible.rules.NONE, "lean": fusible.rules.LEAN}


def mlp(rules=None, dtype=torch.float64) -> fusible.Sequential:
    torch.manual_seed(3)
    return fusible.Sequential(
        ops.Residual(ops.RMSNorm(8, **ON), ops.Linear(8, 16, **ON), ops.SwiGLU(), ops.Linear(8, 8, bias=False, **ON)),
        ops.LayerNorm(8, **ON),
        ops.Linear(8, 8, bias=False, **ON),
        ops.Bias(8, **ON),
        rules=rules,
    ).to(dtype)


def give_buffers(block, dtype=torch.float32) -> None:
    for parameter in block.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=dtype)


def batches(dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def wanted(block, xs) -> list[Tensor]:
    totals = [torch.zeros_like(p) for p in block.parameters()]
    for x in xs:
        for total, grad in zip(
            totals, torch.autograd.grad(block.reference(x).square().sum(), [*block.parameters()]), strict=True
        ):
            total += grad
    return totals


@pytest.mark.parametrize("buffers", [torch.float64, torch.float32])
@pytest.mark.parametrize("rules", RULES)
def test_the_sum_of_two_batches(rules, buffers):
    """B039, TE#287, with every parameter instead of one weight."""
    block = mlp(RULES[rules])
    want = wanted(block, batches())
    give_buffers(block, buffers)
    fired = []
    for name, parameter in block.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, p.grad.any().item())))
    for x in batches():
        block(x).square().sum().backward()
    tolerance = 1e-10 if buffers is torch.float64 else 1e-5
    for parameter, total in zip(block.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.main_grad.double(), total, rtol=tolerance, atol=tolerance)
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()
    assert sorted(fired) == sorted([(name, False) for name, _ in block.named_parameters()] * 2)


@pytest.mark.quick
def test_the_products_of_weights_are_added_by_the_gemm():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    block = mlp(fusible.rules.NONE)
    give_buffers(block, torch.float64)
    y = block(batches()[0])
    with Calls():
        y.sum().backward()
    assert names.count("addmm_") == 3


@pytest.mark.quick
@pytest.mark.parametrize("rules", ["default", "none"])
def test_a_weight_without_a_buffer_is_named(rules):
    block = mlp(RULES[rules])
    give_buffers(block)
    del block[0][1].weight.main_grad
    before = [p.main_grad.clone() for p in block.parameters() if hasattr(p, "main_grad")]
    y = block(batches()[0])
    with pytest.raises(RuntimeError) as error:
        y.sum().backward()
    assert str(error.value) == (
        "weight of Linear (op 0.1) is to be accumulated into main_grad, but the parameter has none; before backward "
        "give it a buffer, as in parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)"
    )
    after = [p.main_grad for p in block.parameters() if hasattr(p, "main_grad")]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(p.grad is None for p in block.parameters())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("buffer", "got"),
    [
        (torch.zeros(8), r"got \[8\] torch.float32 on cpu"),
        (torch.zeros(8, 8, dtype=torch.int64), r"got \[8, 8\] torch.int64 on cpu"),
        ("a buffer", "but the parameter has 'a buffer'; before backward"),
    ],
)
def test_a_buffer_that_does_not_fit(buffer, got):
    block = fusible.Sequential(ops.Linear(8, 8, bias=False, **ON))
    block[0].weight.main_grad = buffer
    y = block(torch.randn(2, 8))
    with pytest.raises(RuntimeError, match=f"weight of Linear .op 0. is to be accumulated into main_grad, .*{got}"):
        y.sum().backward()


def test_B014_swift_9790_frozen_weights_and_biases_need_no_buffer():
    torch.manual_seed(0)
    block = fusible.Sequential(
        ops.LayerNorm(64), ops.Linear(64, 256, **ON), ops.GELU(), ops.Linear(256, 64, **ON)
    ).double()
    x = torch.randn(8, 64, dtype=torch.float64, requires_grad=True)
    block[3].weight.requires_grad_(False)
    trained = [x, *[p for p in block.parameters() if p.requires_grad]]
    want = torch.autograd.grad(block.reference(x).square().sum(), trained)
    block[1].weight.main_grad = torch.zeros(256, 64, dtype=torch.float64)
    block(x).square().sum().backward()
    got = [block[1].weight.main_grad if t is block[1].weight else t.grad for t in trained]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert block[3].weight.grad is None


@pytest.mark.quick
def test_flags_and_getter_of_the_protocol():
    block = fusible.Sequential(ops.Linear(8, 8, bias=False, **ON)).double()
    weight = block[0].weight
    x = batches()[0]
    (want,) = wanted(block, [x])
    store = torch.full((8, 8), 7.0, dtype=torch.float64)
    weight.get_main_grad = lambda: store
    weight.overwrite_main_grad = True
    weight.grad_added_to_main_grad = False
    for _ in range(2):
        block(x).square().sum().backward()
    torch.testing.assert_close(store, want)
    assert weight.grad_added_to_main_grad
    weight.overwrite_main_grad = False
    block(x).square().sum().backward()
    torch.testing.assert_close(store, 2 * want)


@pytest.mark.quick
def test_gradients_that_are_asked_for_are_returned():
    block = mlp()
    give_buffers(block)
    x = batches()[0].requires_grad_()
    inputs = [x, *block.parameters()]
    want = torch.autograd.grad(block.reference(x).sum(), inputs)
    for a, b in zip(torch.autograd.grad(block(x).sum(), inputs), want, strict=True):
        torch.testing.assert_close(a, b)
    block(x).sum().backward(inputs=[x])
    torch.testing.assert_close(x.grad, want[0])
    assert not any(p.main_grad.any() for p in block.parameters())


@pytest.mark.quick
def test_what_would_be_lost_raises():
    block = fusible.Sequential(ops.Linear(8, 8, bias=False, **ON)).double()
    give_buffers(block)
    x = batches()[0]
    with pytest.raises(
        RuntimeError, match=r"weight of Linear \(op 0\) is to be .* backward runs with create_graph=True"
    ):
        block(x).sum().backward(create_graph=True)
    handle = block[0].weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match=r"a tensor hook \(register_hook\) on the parameter would not see"):
        block(x).sum().backward()
    handle.remove()
    block(x).sum().backward()
    assert block[0].weight.main_grad.any()


@pytest.mark.quick
def test_one_parameter_of_two_ops_is_added_once_each(monkeypatch):
    shared = ops.Linear(8, 8, **ON)
    block = fusible.Sequential(ops.Residual(ops.RMSNorm(8), shared), ops.Residual(ops.RMSNorm(8), shared)).double()
    x = batches()[0]
    for size in (segments.SEGMENT_BYTES, 1):
        monkeypatch.setattr(segments, "SEGMENT_BYTES", size)
        again = fusible.Sequential(*block)
        want = wanted(again, [x])
        give_buffers(again, torch.float64)
        again(x).square().sum().backward()
        for parameter, total in zip(again.parameters(), want, strict=True):
            own = parameter is shared.weight or parameter is shared.bias
            got = parameter.main_grad if own else parameter.grad
            torch.testing.assert_close(got, total)
            parameter.grad = None


@pytest.mark.quick
def test_half_precision_parameters_with_buffers_in_float32():
    block = mlp(dtype=torch.bfloat16)
    give_buffers(block)
    for x in batches(torch.bfloat16):
        block(x).square().sum().backward()
    for parameter, total in zip(block.parameters(), wanted(block, batches(torch.bfloat16)), strict=True):
        assert parameter.main_grad.dtype is torch.float32
        torch.testing.assert_close(parameter.main_grad, total.float(), rtol=0.1, atol=0.1 * total.abs().max().item())
