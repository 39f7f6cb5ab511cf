"""What ops ask of their input's spec. Texts come without the subject, which the fuser puts in front."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.op import Spec


def shown(x: Spec) -> str:
    """The shape of x, as errors end with it: `(x: [8, 63])`."""
    return f"(x: {list(x.shape)})"


def arithmetic(x: Spec, name: str = "x") -> Spec:
    """x itself, if one can calculate with it."""
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name} must have a floating dtype, got {x.dtype}; convert it first, with float()")
    if not x.shape:
        raise ValueError(f"{name} must have at least one dimension, got a scalar; reshape it to [1]")
    return x


def trailing(x: Spec, shape: Sequence[int], owner: str) -> Spec:
    """x itself, if its last dimensions are `shape`; `owner` names what has that shape."""
    arithmetic(x)
    wanted = tuple(shape)
    got = x.shape[-len(wanted) :]
    if got == wanted:
        return x
    if len(wanted) == 1:
        raise ValueError(f"{owner} has {wanted[0]} elements but x's last dimension is {got[0]} {shown(x)}")
    raise ValueError(f"{owner} has shape {list(wanted)} but x's last dimensions are {list(got)} {shown(x)}")
