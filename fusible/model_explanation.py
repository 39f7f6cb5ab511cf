"""`explain` of a whole model: each block inside it at its path, with the inputs that a forward without data gives it.

The model itself is not run, no hook of it fires and nothing of it changes: a shadow runs, which has the same modules
without hooks and with tensors without data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as tree

from fusible import _torch, calibration
from fusible.explaining import hooked_op
from fusible.explanation import Explanation, PartRow, show_tensor
from fusible.sequential import Sequential, observed_blocks

__all__ = ["explain"]


class Call(NamedTuple):
    """One call of a block, and the modes around it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    autocast: torch.dtype | None
    blind: str  # why the shapes of its inputs are not known; empty if they are


def explain(model: torch.nn.Module, *inputs: Any, strict: bool = False, **named: Any) -> Explanation:
    """What runs fused in a model, and what does not, for one kind of call. Nothing is run, no hook fires.

    Lists each `fusible.Sequential` inside the model at its path, part by part, as `Sequential.explain` does. The inputs
    that each gets are found by running the model's forward on tensors without data; behind a module that needs data, or
    has forward hooks, bytes are unknown.

    Args:
        inputs, named: as for a call of the model. Without any, each block is explained for one row.
        strict: raise `RuntimeError` with the reasons if anything did not fuse.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"fusible.explain: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, Sequential):
        return model.explain(*inputs, strict=strict, **named)
    blocks = _blocks(model)
    walk = _Walk(model)
    if inputs or named:
        walk.run(inputs, named)
    rows = [row for path, block in blocks for row in _rows(path, block, walk.calls.get(path, []), walk)]
    notes = list(walk.notes)
    if not blocks:
        notes.append(f"{type(model).__name__} has no fusible.Sequential inside: nothing can fuse")
    shown = ", ".join(show_tensor(t) for t in tree.tree_leaves((inputs, named)) if isinstance(t, torch.Tensor))
    title = f"{type(model).__name__} on {shown or 'one row for each block'}"
    explanation = Explanation(title, tuple(rows), calibration.find()[1], tuple(notes))
    if strict and explanation.unfused:
        raise RuntimeError(f"{type(model).__name__} is not fully fused: " + "; ".join(explanation.unfused))
    return explanation


def _blocks(model: torch.nn.Module) -> list[tuple[str, Sequential]]:
    """The outermost blocks, and those inside them that run on their own, at their paths."""
    found: list[tuple[str, Sequential]] = []
    for path, module in model.named_modules():
        if isinstance(module, Sequential) and not any(_opened(outer, path, module) for outer in found):
            found.append((path, module))
    return found


def _opened(outer: tuple[str, Sequential], path: str, module: Sequential) -> bool:
    """Whether a block inside another one is part of its chains."""
    return path.startswith(f"{outer[0]}.") and any(module is part for part in outer[1].opened())


def _rows(path: str, block: Sequential, calls: list[Call], walk: _Walk) -> Iterator[PartRow]:
    """A block's parts for each kind of call that it gets."""
    if not calls:
        reason = walk.failed or ("the model's forward does not call it" if walk.ran else "")
        yield from _default(path, block, reason)
        return
    seen: list[tuple[PartRow, ...]] = []
    for call in calls:
        if call.blind:
            parts = tuple(_default(path, block, call.blind))
        else:
            x = next((t for t in call.args if isinstance(t, torch.Tensor)), None)
            device = x.device.type if x is not None else "cpu"
            with (
                torch.set_grad_enabled(call.grad),
                torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None),
            ):
                parts = tuple(replace(part, path=path) for part in block.explain(*call.args, **call.kwargs).parts)
        if parts not in seen:
            seen.append(parts)
            yield from parts


def _default(path: str, block: Sequential, why: str) -> Iterator[PartRow]:
    """A block whose inputs are not known: its plan for one row; bytes are left out if `why` says why."""
    try:
        parts = block.explain().parts
    except ValueError:
        yield PartRow("the block", f"not planned: {why or 'its width cannot be told from its ops'}", path=path)
        return
    for part in parts:
        part = replace(part, path=path)
        yield _without_bytes(part, why) if why else part


def _without_bytes(part: PartRow, why: str) -> PartRow:
    def unknown(rows: tuple) -> tuple:
        return tuple(
            replace(row, inputs=(), outputs=(), read=None, written=None, traffic=None, flops=None, seconds=None,
                    floor=None)
            for row in rows
        )  # fmt: skip

    kept = tuple(replace(row, field=row.field.partition(" ")[0], bytes=None) for row in part.kept)
    ops = tuple(replace(op, output=None) for op in part.ops)
    return replace(
        part, forward=unknown(part.forward), backward=unknown(part.backward), kept=kept, ops=ops,
        notes=(*part.notes, f"planned for a row of its width, bytes unknown: {why}"),
    )  # fmt: skip


class _Walk:
    """Runs a model's forward on a shadow of it, and notes what each block is called with."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.calls: dict[str, list[Call]] = {}
        self.notes: list[str] = []
        self.failed = ""
        self.blind = ""
        self.ran = False
        self.paths: dict[int, str] = {}
        self._shadows: dict[int, torch.nn.Module] = {}
        self._tensors: dict[int, Any] = {}

    def run(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.ran = True
        if any(_torch.GLOBAL_MODULE_HOOKS):
            self.failed = "global module hooks are registered, and none may fire"
            self.notes.append(f"no shapes are known: {self.failed}")
            return
        mode = _torch.fake_mode()
        with mode, _torch.quiet_fakes(), observed_blocks(self._note):
            shadow = self._shadow(self.model, "")
            args, kwargs = tree.tree_map_only(torch.Tensor, self._fake, (inputs, named))
            try:
                shadow(*args, **kwargs)
            except Exception as error:
                self._fail(error)

    def _note(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = self.paths.get(id(block))
        if path is None:
            return
        device = args[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = Call(args, dict(kwargs), torch.is_grad_enabled(), autocast, self.blind)
        self.calls.setdefault(path, []).append(call)

    def _fail(self, error: Exception) -> None:
        """Forward raised: the blocks that it had not reached get no shapes."""
        where, trace = "", error.__traceback__
        while trace is not None:
            where = self.paths.get(id(trace.tb_frame.f_locals.get("self")), where)
            trace = trace.tb_next
        culprit = where or type(self.model).__name__
        text = str(error).strip().splitlines()
        self.failed = f"shapes behind {culprit} are unknown, as its forward cannot run without data"
        self.notes.append(f"{self.failed} ({type(error).__name__}{': ' + text[0] if text else ''})")

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._tensors.get(id(tensor))
        if known is None:
            fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            known = self._tensors[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        return known

    def _shadow(self, module: torch.nn.Module, path: str) -> torch.nn.Module:
        """The same module without hooks, with tensors without data; its attributes are the original's."""
        known = self._shadows.get(id(module))
        if known is not None:
            return known
        shadow = object.__new__(type(module))
        self._shadows[id(module)] = shadow
        self.paths[id(shadow)] = path
        state = dict(module.__dict__)
        for name in _torch.MODULE_HOOKS:
            state[name] = OrderedDict()
        for kind in ("_parameters", "_buffers"):
            state[kind] = {name: None if t is None else self._fake(t) for name, t in module.__dict__[kind].items()}
        prefix = f"{path}." if path else ""
        state["_modules"] = {name: None if child is None else self._shadow(child, prefix + name)
                             for name, child in module._modules.items()}  # fmt: skip
        if isinstance(module, Sequential):
            state["_state"] = None
        shadow.__dict__.update(state)
        if (module._forward_hooks or module._forward_pre_hooks) and hooked_op(module) is None:
            shadow.__dict__["forward"] = self._blinding(shadow, path)
        return shadow

    def _blinding(self, shadow: torch.nn.Module, path: str) -> Callable[..., Any]:
        """A forward behind which shapes count as unknown, since a hook that does not fire may change them."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = type(shadow).forward(shadow, *args, **kwargs)
            if not self.blind:
                what = path or type(self.model).__name__
                self.blind = f"{what} has forward hooks, which may change shapes and were not run"
                self.notes.append(f"shapes behind {what} are unknown: it has forward hooks, which were not run")
            return result

        return forward
