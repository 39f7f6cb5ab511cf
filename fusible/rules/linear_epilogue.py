"""Forward: what follows a linear layer is done by its GEMM or on its fresh result, a bias, an activation, a
residual."""

from __future__ import annotations

from fusible import kernels
from fusible.op import Out
from fusible.ops import AddExtraInput, BasicLinear, Bias, ConstantScale
from fusible.ops.activation import Activation
from fusible.ops.linear import compute_dtype
from fusible.rule import forward

__all__ = ["linear_activation", "linear_add", "linear_bias", "linear_scale_add"]


def one_dtype(linear, bias, env):
    """The GEMM and its bias work in one dtype, so that the sum is rounded as the ops would round it."""
    dtype = compute_dtype(env.dtype, linear.weight.dtype, env.autocast)
    if bias is not None and env.autocast is None:
        same = bias.bias.dtype == dtype
        yield same, f"Bias is {bias.bias.dtype}, Linear computes in {dtype}", "give both one dtype"


def in_dtype(dtype, *tensors):
    """The tensors in the dtype of the GEMM."""
    return [t if t is None or t.dtype is dtype else t.to(dtype) for t in tensors]


@forward(aliases=False)
def linear_bias(linear: BasicLinear, bias: Bias, /, x, weight, b, *, env):
    """The bias is added by the GEMM."""
    x, weight, b = in_dtype(env.out_dtype, x, weight, b)
    return Out(kernels.gemm_bias(x, weight, b), linear=BasicLinear.Saved(x))


@linear_bias.requires
def _(linear, bias, env):
    yield from one_dtype(linear, bias, env)


@forward(aliases=False)
def linear_activation(linear: BasicLinear, bias: Bias | None, act: Activation, /, x, weight, b, *, env):
    """The activation writes over the GEMM's result, where backward does not ask for that."""
    x, weight, b = in_dtype(env.out_dtype, x, weight, b)
    y = kernels.gemm(x, weight) if b is None else kernels.gemm_bias(x, weight, b)
    return Out(act.apply_(y), linear=BasicLinear.Saved(x), act=type(act).Saved(y))


@linear_activation.requires
def _(linear, bias, act, env):
    yield from one_dtype(linear, bias, env)
    name = type(act).__name__
    reads_input = "x" in type(act).Saved.fields and env.keeps.act.x
    change = "one whose backward reads its output can (ReLU, Sigmoid, Tanh), and any can where no gradient is wanted"
    yield not reads_input, f"backward of {name} reads its input, so {name} cannot write over it", change


@forward(aliases=False)
def linear_add(linear: BasicLinear, bias: Bias | None, add: AddExtraInput, /, x, extra, weight, b, *, env):
    """The residual is added by the GEMM, or with a bias in place on its result."""
    x, weight, b = in_dtype(env.out_dtype, x, weight, b)
    return Out(kernels.gemm_add(x, weight, b, extra), linear=BasicLinear.Saved(x))


@linear_add.requires
def _(linear, bias, add, env):
    yield from one_dtype(linear, bias, env)
    yield from same_extra(linear, env)


def same_extra(linear, env):
    dtype = compute_dtype(env.dtype, linear.weight.dtype, env.autocast)
    same = env.extras[0] == dtype
    yield same, f"the extra input is {env.extras[0]}, Linear computes in {dtype}", f"make the extra input {dtype}"


@forward(aliases=False)
def linear_scale_add(linear: BasicLinear, scale: ConstantScale, add: AddExtraInput, /, x, extra, weight, *, env):
    """The GEMM scales its product and adds it to the residual."""
    x, weight = in_dtype(env.out_dtype, x, weight)
    factor = scale.scale
    y = kernels.gemm_scale_add(x, weight, factor, extra)
    return Out(y, linear=BasicLinear.Saved(x), scale=ConstantScale.Saved(factor))


@linear_scale_add.requires
def _(linear, scale, add, env):
    yield from same_extra(linear, env)
