"""The contract of an op, on one page: `Op`, `Saved`, `Out`, `Grads`, `Env`.

An op says what it computes (`reference`), how to run it (`fwd`), what it keeps for backward (`Saved`), and how to run
it backwards from that alone (`bwd`). `reference` is enough; the other two are written for speed or for memory.

    class Scale(Op):
        def __init__(self, size):
            super().__init__()
            self.g = torch.nn.Parameter(torch.ones(size))

        class Saved(Saved):
            x: Tensor = reads_for("g")          # kept only if the gradient of g is wanted

        def reference(self, x, g):
            return x * g

        def fwd(self, x, g):
            return Out(x * g, saved=Scale.Saved(x))

        def bwd(self, saved, dy, g=reads_for("x"), *, env):
            dg = (dy * saved.x).flatten(0, -2).sum(0) if env.needs.g else None
            return Grads(dy * g, g=dg)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = ["Absent", "Env", "Grads", "Names", "Op", "Out", "Saved", "Spec", "reads_for"]


class Absent:
    """In `Op.extra_input_names`: an extra input that these options do without; `reference` and `fwd` get `None`."""


class ReadsFor(NamedTuple):
    """Which gradients read a saved field or a parameter in backward; made by `reads_for`."""

    gradients: frozenset[str]


def reads_for(*gradients: str) -> Any:
    """Declares which gradients read a saved field, or a parameter in backward.

    As the default of a field of `Saved`: the field is kept only if one of these gradients is wanted. As the default of
    a parameter of `bwd`: the parameter is kept for backward only then, and arrives as `None` otherwise. `"x"` is the
    gradient of the stream, extra inputs and parameters go by their names in `reference`. With no names: read by none.
    Without a declaration a field or parameter counts as read by every gradient of its op.
    """
    return ReadsFor(frozenset(gradients))


class Saved(tuple):
    """What one op keeps for its backward in one call: an immutable record with named fields.

    Subclass it inside the op and annotate the fields, in order. A field holds a tensor, `None`, or a plain value.
    A field that no wanted gradient reads (`reads_for`) is dropped by the fuser and arrives as `None` in `bwd`.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    readers: ClassVar[dict[str, frozenset[str] | None]] = {}

    def __init_subclass__(cls) -> None:
        cls.fields = tuple(name for name in inspect.get_annotations(cls) if not name.startswith("_"))
        declared = {name: cls.__dict__.get(name) for name in cls.fields}
        cls.readers = {name: mark.gradients if isinstance(mark, ReadsFor) else None for name, mark in declared.items()}
        for index, name in enumerate(cls.fields):
            setattr(cls, name, property(itemgetter(index)))
        if cls.fields and "__new__" not in cls.__dict__:
            cls.__new__ = _constructor(cls.fields)  # type: ignore[method-assign]
            cls.__new__.__name__ = cls.__new__.__qualname__ = cls.__qualname__  # as Python's errors call it

    def __new__(cls, *values: Any, **named: Any) -> Saved:
        if values or named:
            raise TypeError(f"{cls.__qualname__} has no fields; annotate them in it, as in x: Tensor")
        return tuple.__new__(cls)

    def __getnewargs__(self) -> tuple:
        return tuple(self)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{n}={v!r}' for n, v in zip(self.fields, self, strict=True))})"


def _constructor(fields: tuple[str, ...]) -> Any:
    """`__new__` with the fields as its arguments: as a namedtuple does it, for speed and for Python's own errors."""
    names = ", ".join(fields)
    return eval(f"lambda cls, {names}: new(cls, ({names},))", {"new": tuple.__new__})


class Out:
    """What a forward step returns: the stream, the extra outputs, and one record per op.

    An op's `fwd` writes `Out(y, *extra_outputs, saved=Saved(...))`, a forward rule `Out(y, *extra_outputs,
    slot=Saved(...))` with its slots' names. Records of ops that keep nothing are left out.
    """

    __slots__ = ("records", "values")

    def __init__(self, *values: Tensor, **records: Saved) -> None:
        self.values = values
        self.records = records


class Grads:
    """What a backward step returns: the gradient of the stream, of the extra inputs, and of the parameters.

    An op's `bwd` writes `Grads(dx, *d_extra_inputs, weight=dw)`, a backward rule `Grads(dx, *d_extra_inputs,
    slot={"weight": dw})`. A gradient that nobody wants (`env.needs`) may be `None`, or left out if it is a parameter's.
    """

    __slots__ = ("params", "values")

    def __init__(self, *values: Tensor | None, **params: Any) -> None:
        self.values = values
        self.params = params


class Spec(NamedTuple):
    """Shape, dtype and device of a value in the chain: what is known before anything runs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def width(self) -> int:
        """The last dimension."""
        return self.shape[-1]


class Names:
    """A set of dotted names that is asked by attribute: `needs.x`, `needs.linear.weight`.

    Asking for a name that does not exist raises `AttributeError`, so that a typing error is not a silent "no".
    """

    def __init__(self, names: frozenset[str], known: frozenset[str]) -> None:
        self._names = names
        for name in known:
            first, _, rest = name.partition(".")
            if not rest:
                self.__dict__[first] = name in names
            elif first not in self.__dict__:
                self.__dict__[first] = Names(_below(first, names), _below(first, known))

    def __getattr__(self, name: str) -> Any:
        there = sorted(key for key in self.__dict__ if not key.startswith("_"))
        raise AttributeError(f"no {name!r} here; there are {', '.join(there) or 'no names'}")

    def __bool__(self) -> bool:
        return bool(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __repr__(self) -> str:
        return f"Names({', '.join(self)})"


def _below(first: str, names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.removeprefix(first + ".") for name in names if name.startswith(first + "."))


@dataclass(frozen=True)
class Env:
    """One kind of call, as an op or a rule's conditions see it at their place in the chain.

    Everything here is part of the plan's key, so a decision made from it holds for the whole life of the plan. There is
    no rank and no number of rows: one plan serves them all.

    Attributes:
        dtype: of the stream where it enters the op or run.
        device: of the stream.
        width: last dimension of the stream, or `None` where an earlier op makes it depend on the number of rows.
        out_dtype: dtype of the stream where it leaves.
        extras: dtype of each extra input of the op or run, in order.
        needs: which gradients are wanted: `needs.x`, `needs.weight` in an op, `needs.linear.weight` in a rule.
        keeps: which fields of the records are kept for backward: `keeps.x` in an op, `keeps.act.x` in a rule.
        grad_enabled: grad mode when the call started.
        autocast: the dtype of autocast on this device, or `None` where it is off.
        recipe: the recipe of the call (`None` until low precision comes).
        backend: the forced kernel backend, or `None`.
    """

    dtype: torch.dtype
    device: torch.device
    width: int | None
    out_dtype: torch.dtype
    extras: tuple[torch.dtype, ...]
    needs: Names
    keeps: Names
    grad_enabled: bool
    autocast: torch.dtype | None
    recipe: Any = None
    backend: str | None = None

    @property
    def device_type(self) -> str:
        return self.device.type


class Signature(NamedTuple):
    """The argument names of an op's `reference`, told apart: `x`, the extra inputs, the parameters."""

    extras: tuple[str, ...]
    params: tuple[str, ...]

    @property
    def gradients(self) -> tuple[str, ...]:
        return ("x", *self.extras, *self.params)


class Op(torch.nn.Module):
    """One node of a chain. Subclass it, write `reference`, and put it into a `fusible.Sequential`.

    `reference(self, x, *extra_inputs, *params)` is plain differentiable torch: the formula, the fallback and the truth
    of the tests. It gets one argument per parameter that the op registered, by name and in that order, and returns `y`
    or `(y, *extra_outputs)`.

    `fwd(self, x, *extra_inputs, *params)` returns an `Out`, `bwd(self, saved, dy, *d_extra_outputs, *params)` returns
    `Grads`. Both run with grad mode and autocast off, both may take a keyword-only `env`. An op has both or none; with
    none the fuser differentiates `reference` inside its node. The gradient of an unused output arrives as `None`.

    `infer` gives the output's `Spec`; without it the fuser asks `reference`, on fake tensors.

    Called alone, an op is its `reference` with its own parameters.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    #: Inputs (`"x"`, extra inputs by name) whose last dimension is a length, and so no part of a plan's key: tokens.
    lengthwise: ClassVar[tuple[str, ...]] = ()
    #: Whether outputs may share memory with inputs; where this is False the fuser does not look.
    aliases: ClassVar[bool] = True
    #: Whether gradients may be views of incoming gradients (or one the other); handing one on as it is is no view.
    grad_aliases: ClassVar[bool] = True
    #: Whether every output is x itself.
    hands_on: ClassVar[bool] = False
    #: Whether it calculates anything; an op that does not could stand elsewhere in the chain.
    calculates: ClassVar[bool] = True
    #: Attributes that `bwd` or `replay` reads as `fwd` did, and no record holds: changed in between, backward raises.
    fixed: ClassVar[tuple[str, ...]] = ()
    #: Whether gradients of parameters are added to each parameter's `main_grad` (docs/main-grad.md).
    accumulate_into_main_grad: bool = False
    #: Whether extra outputs whose channel is read inside the block go to the caller as well.
    keep: bool = False
    Saved: ClassVar[type[Saved]] = Saved
    #: The argument names of `reference`, read off it.
    signature: ClassVar[Signature] = Signature((), ())

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        arguments = list(inspect.signature(cls.reference).parameters.values())[2:]  # without self and x
        names = [a.name for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
        cls.signature = Signature(tuple(names[: cls.num_extra_inputs]), tuple(names[cls.num_extra_inputs :]))

    def reference(self, x: Tensor, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define reference(self, x, ...), the plain formula")

    def fwd(self, x: Tensor, *args: Any) -> Out:
        raise NotImplementedError

    def bwd(self, saved: Any, *args: Any) -> Grads:
        raise NotImplementedError

    def infer(self, x: Spec, *extras: Spec, autocast: torch.dtype | None = None) -> Spec | tuple[Spec, ...]:
        """Spec of `y` (or of `y` and the extra outputs). Raises `ValueError` on input that does not fit the op."""
        raise NotImplementedError

    def replay(self, saved: Any, x: Tensor, *args: Any) -> Any:
        """`reference` again, for double backward. An op that draws random numbers replays them from its record."""
        return self.reference(x, *args)

    def declines(self) -> str | None:
        """Why these options cannot be part of a chain; the op then runs on its own, as a plain module."""
        return None

    def is_identity(self) -> bool:
        """Whether the op does nothing now, judged by `training` and absent parameters only; the fuser then skips it."""
        return False

    def expand(self) -> tuple[Op, ...]:
        """The ops that this one stands for in a chain, borrowing its parameters: itself, unless overridden."""
        return (self,)

    def sources(self) -> list[tuple[dict[str, Any], str]]:
        """Where each parameter argument is read at each call: (a module's `_parameters`, name)."""
        return [(self._parameters, name) for name in self.signature.params]

    def option_sources(self) -> list[tuple[dict[str, Any], str]]:
        """Where each of `fixed` is read at each call: (a module's attributes, name)."""
        return [(self.__dict__, name) for name in type(self).fixed]

    def extra_input_names(self) -> tuple[Any, ...]:
        """Name of the channel that each extra input reads; `None`: by position; `Absent`: these options have none."""
        return (None,) * self.num_extra_inputs

    def present_inputs(self) -> tuple[str | None, ...]:
        """The names of the extra inputs that these options ask for."""
        return tuple(name for name in self.extra_input_names() if name is not Absent)

    def extra_output_names(self) -> tuple[str | None, ...]:
        """Name of the channel that each extra output feeds; `None` for one that goes to the caller."""
        return (None,) * self.num_extra_outputs

    def forward(self, x: Tensor, *extras: Tensor) -> Any:
        if isinstance(
            x, torch.fx.Proxy
        ):  # a formula may look at shapes and dtypes, so an op stays one node of the graph
            return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x, *extras), {})
        return self.reference(x, *self.placed(extras), *(getattr(self, name) for name in self.signature.params))

    def placed(self, extras: Sequence[Any]) -> list[Any]:
        """The extra inputs that were given, with `None` for each absent one."""
        names, count = self.extra_input_names(), len(self.present_inputs())
        if len(extras) != count:
            raise TypeError(f"{type(self).__name__} takes x and {count} extra inputs, got {len(extras)}")
        given = iter(extras)
        return [None if name is Absent else next(given) for name in names]


Into = Mapping[str, Tensor | None]
#: What a `bwd` or backward rule gets as `into` by default: no buffer for any gradient.
NOWHERE: Into = MappingProxyType({})


def has_kernels(kind: type[Op]) -> bool:
    """Whether the op wrote `fwd` and `bwd` (else the fuser differentiates `reference`)."""
    return kind.fwd is not Op.fwd


@cache
def bwd_reads(kind: Any) -> dict[str, frozenset[str] | None]:
    """Per parameter of `bwd`: the gradients that read it, `None` for every one."""
    if not has_kernels(kind):
        return {name: frozenset() for name in kind.signature.params}
    first = 3 + kind.num_extra_outputs  # self, saved, dy, d_extra_outputs
    arguments = list(inspect.signature(kind.bwd).parameters.values())[first:]
    marks = [a.default for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
    readers = [mark.gradients if isinstance(mark, ReadsFor) else None for mark in marks]
    return dict(zip(kind.signature.params, readers, strict=True))


@cache
def check_kind(kind: Any, registered: tuple[str, ...]) -> None:
    """Raises `TypeError` if the signatures of an op's methods do not fit its parameters."""
    name = kind.__name__
    if kind.reference is Op.reference:
        raise TypeError(f"{name} lacks reference(self, x, ...): write its formula in plain torch")
    if not (isinstance(kind.Saved, type) and issubclass(kind.Saved, Saved)):
        raise TypeError(f"{name}.Saved must be a subclass of fusible.Saved, got {kind.Saved!r}")
    if (kind.fwd is Op.fwd) != (kind.bwd is Op.bwd):
        missing = "bwd" if kind.bwd is Op.bwd else "fwd"
        raise TypeError(f"{name} lacks {missing}: write both fwd and bwd, or neither and keep only reference")
    extras, params = kind.signature
    shown = ", ".join(("x", *extras, *params))
    for parameter in registered:
        if parameter not in params:
            wanted = ", ".join(("self", "x", *extras, *registered))
            raise TypeError(f"{name}.reference({shown}) lacks its parameter {parameter}; write reference({wanted})")
    for parameter in params:
        if parameter not in registered:
            raise TypeError(
                f"{name}.reference({shown}) asks for {parameter}, which the op has not registered; register a "
                f"parameter {parameter}, or set num_extra_inputs if it is an extra input"
            )
    if has_kernels(kind):
        _check_arguments(kind, "fwd", ["x", *extras, *params])
        outputs = ["d_extra_output"] * kind.num_extra_outputs
        _check_arguments(kind, "bwd", ["saved", "dy", *outputs, *params])


def _check_arguments(kind: type[Op], method: str, wanted: list[str]) -> None:
    parameters = list(inspect.signature(getattr(kind, method)).parameters.values())[1:]
    got = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(got) != len(wanted):
        raise TypeError(
            f"{kind.__name__}.{method} must take ({', '.join(wanted)}), got ({', '.join(got)}); "
            f"write {method}(self, {', '.join(wanted)})"
        )
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    allowed = {"env", "into"} if method == "bwd" else {"env"}
    if keywords - allowed:
        raise TypeError(
            f"{kind.__name__}.{method} may take the keyword {' and '.join(sorted(allowed))} alone, got "
            f"{', '.join(sorted(keywords))}"
        )


def takes(function: Any, keyword: str) -> bool:
    """Whether a `fwd` or `bwd` wants the keyword `env` or `into`."""
    return keyword in inspect.signature(function).parameters


def view(kind: type[Op], module: torch.nn.Module) -> Any:
    """An op of type `kind` that reads its options and parameters from `module` at each use.

    The two share one `__dict__`, so nothing can go stale; `kind` must find there every option that it reads, or have a
    class attribute for it.
    """
    op = kind.__new__(kind)
    op.__dict__ = module.__dict__
    return op
