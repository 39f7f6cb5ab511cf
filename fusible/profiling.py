"""`profile`: the time of each step of a block or model, measured, beside what a copy of its bytes would take."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import calibration, executable
from fusible._progress import progress
from fusible.chain import Split
from fusible.costs import Cost, Ran, floor, watched
from fusible.explanation import show_tensor
from fusible.fuser import OperationFuser
from fusible.ops import BasicLinear
from fusible.parts import Place, blocks_of, nodes_of, replaced
from fusible.plan import Step
from fusible.profile_report import BlockTime, Profile, StepTime
from fusible.sequential import Sequential

__all__ = ["Profile", "StepTime", "copy_rate", "profile"]

#: Calls before any is timed.
WARM_UP = 3
#: Bytes of the tensor whose copy tells how fast memory is.
COPIED = 1 << 25


def profile(model: torch.nn.Module, *inputs: Any, rounds: int = 20, **named: Any) -> Profile:
    """Times each step of a block, or of every block of a model, forward and, where gradients are wanted, backward.

    Rounds in which only the whole is timed alternate with rounds in which each block of a model is, and with rounds in
    which each step is; the medians count. A module that splits a block has lines of its own; what a model does outside
    of its blocks is one line. Each call is a real one: random numbers are drawn, buffers are updated, nothing is
    written to `.grad`.

    Args:
        model: a `Sequential`, or a module that contains some.
        inputs, named: as for a call; those that require a gradient get one, as the model's parameters do.
        rounds: how many of each kind.

    Raises:
        ValueError: nothing in the model is a `Sequential`, or `rounds` is less than 1.
    """
    if rounds < 1:
        raise ValueError(f"profile: rounds must be at least 1, got {rounds}")
    if not blocks_of(model):
        raise ValueError(f"profile: {type(model).__name__} contains no fusible.Sequential; profile a model that does")
    call = _Call(model, inputs, named)
    parts, steps = _Clock(model), _Clock(model)
    alone = isinstance(model, Sequential) and not any(isinstance(part, Split) for part in model.resolved().parts)
    wholes: list[tuple[float, float]] = []
    with progress(f"profile of {type(model).__name__}", WARM_UP + rounds) as advance:
        for turn in range(WARM_UP + rounds):
            whole = call.run()
            if not alone:  # else the whole is the one part
                with parts.timed():
                    call.run()
            with steps.timed(), executable.observed(steps.observe):
                call.run()
            if turn < WARM_UP:
                parts.rounds.clear()
                steps.rounds.clear()
            else:
                wholes.append(whole)
            advance()
    rate = copy_rate()
    forward, backward = (statistics.median(times) for times in zip(*wholes, strict=True))
    blocks = () if isinstance(model, Sequential) else tuple(_block_times(parts))
    lines = sorted(_step_times(steps, parts, rate), key=lambda pair: pair[0])
    machine, _ = calibration.find()
    roofs = None
    if machine is not None:
        speeds = [speed for curve in machine.products.values() for _, speed in curve]
        roofs = machine.memory_rate(COPIED), max(speeds)
    return Profile(call.title, tuple(step for _, step in lines), blocks, forward, backward, rate, roofs)


def _block_times(parts: _Clock) -> Iterator[BlockTime]:
    medians = parts.medians()
    for block in dict.fromkeys(span.place.block for span in medians):
        own = {way: [s for span, s in medians.items() if span.place.block == block and span.direction == way]
               for way in ("forward", "backward")}  # fmt: skip
        yield BlockTime(block, sum(own["forward"]), sum(own["backward"]))


def _step_times(steps: _Clock, parts: _Clock, rate: float) -> Iterator[tuple[Any, StepTime]]:
    """Steps, and modules that run as they are, each with its place in the list."""
    machine, _ = calibration.find()
    for number, (span, seconds) in enumerate([*steps.medians().items(), *parts.medians().items()]):
        place, direction, ops = span
        at = place.part if direction == "forward" else -place.part
        order = (steps.blocks.index(place.block), direction == "backward", at, number)
        if span in steps.seen:
            seen = steps.seen[span]
            size = seen.cost.bytes
            copies = None if seen.product or not size else seconds * rate / size
            least = floor(seen.cost, machine) if machine else None
            yield order, StepTime(place.block, direction, ops, seen.rule, seen.kernels, seconds, size, copies,
                                  seen.cost.flops, least)  # fmt: skip
        elif ops and number >= len(steps.medians()):  # a split, where no step is timed
            yield order, StepTime(place.block, direction, ops, "", "the module itself", seconds, None, None)


class _Call:
    """One forward and backward of the model, timed."""

    def __init__(self, model: torch.nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        self.model = model
        leaves: list[Tensor] = []

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            leaves.append(value.detach().requires_grad_(value.requires_grad))
            return leaves[-1]

        self.inputs = [own(value) for value in inputs]
        self.named = {name: own(value) for name, value in named.items()}
        self.title = f"{type(model).__name__} on {', '.join(show_tensor(leaf) for leaf in leaves)}"
        self.leaves = [t for t in (*leaves, *model.parameters()) if t.requires_grad]

    def run(self) -> tuple[float, float]:
        """Seconds of one forward, and of its backward."""
        start = time.perf_counter()
        outs = self.model(*self.inputs, **self.named)
        middle = time.perf_counter()
        wanted = [out for out in _tensors(outs) if out.requires_grad]
        if not wanted or not self.leaves:
            return middle - start, 0.0
        gradients = [torch.ones_like(out) for out in wanted]
        again = time.perf_counter()
        torch.autograd.grad(wanted, self.leaves, gradients, allow_unused=True)
        return middle - start, time.perf_counter() - again


class _Span(NamedTuple):
    """What is timed: a step or a split by its ops, a chain with none."""

    place: Place
    direction: str
    ops: str


class _Seen(NamedTuple):
    """What is known of a step beside its time."""

    rule: str
    kernels: str
    cost: Cost
    product: bool


class _Clock:
    """Times of the parts of blocks, and of their steps, round by round."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.blocks = list(blocks_of(model))
        self.rounds: list[dict[_Span, float]] = []
        self.seen: dict[_Span, _Seen] = {}
        self.running: list[Place] = []
        self.spans: list[tuple[_Span, float, float]] = []
        self.open: dict[_Span, float] = {}

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """One round."""
        self.spans.clear()
        with replaced(self.model, self._stand_in):
            yield
        end = time.perf_counter()
        for span in list(self.open):  # a module whose input needs no gradient: its backward ends with the whole
            self.stop(span, end)
        self.rounds.append(_own_times(self.spans))

    def start(self, span: _Span) -> None:
        self.open[span] = time.perf_counter()

    def stop(self, span: _Span, now: float) -> None:
        start = self.open.pop(span, None)
        if start is not None:
            self.spans.append((span, start, now))

    def medians(self) -> dict[_Span, float]:
        spans = dict.fromkeys(span for times in self.rounds for span in times)
        return {span: statistics.median(times.get(span, 0.0) for times in self.rounds) for span in spans}

    def _stand_in(self, place: Place, part: Any) -> Any:
        if isinstance(part, Split):
            return part._replace(module=_TimedModule(place, part, self))  # type: ignore[arg-type]
        return _TimedChain(place, part, self)

    def observe(self, direction: str, step: Step) -> Callable[..., Any]:
        span = _Span(self.running[-1], direction, step.ops)

        def run(*args: Any, **into: Any) -> Any:
            if span not in self.seen:
                ran: list[Ran] = []
                result = watched(step.function, step.env.device_type, ran.append)(*args, **into)
                product = any(type(node.op) is BasicLinear for node in step.nodes)
                rule = step.rule.name if step.rule else ""
                self.seen[span] = _Seen(rule, ", ".join(ran[0].kernels) or "torch", ran[0].cost, product)
                return result
            start = time.perf_counter()
            result = step.function(*args, **into)
            self.spans.append((span, start, time.perf_counter()))
            return result

        return run


class _TimedChain:
    """Stands in for a chain."""

    def __init__(self, place: Place, fuser: OperationFuser, clock: _Clock) -> None:
        self.place, self.fuser, self.clock = place, fuser, clock
        self.chain = fuser.chain

    def __call__(self, inputs: tuple[Tensor, ...], rules: Any) -> tuple[Tensor, ...] | None:
        clock, span = self.clock, _Span(self.place, "forward", "")
        clock.running.append(self.place)
        start = time.perf_counter()
        outs = self.fuser(inputs, rules)
        clock.spans.append((span, start, time.perf_counter()))
        clock.running.pop()
        for node in nodes_of(outs or (), inputs):
            self._watch(node)
        return outs

    def _watch(self, node: Any) -> None:
        clock, span = self.clock, _Span(self.place, "backward", "")

        def begin(gradients: Any) -> None:
            clock.running.append(self.place)
            clock.start(span)

        def end(gradients: Any, _: Any) -> None:
            clock.stop(span, time.perf_counter())
            clock.running.pop()

        node.register_prehook(begin)
        node.register_hook(end)


class _TimedModule:
    """Stands in for a module between two chains."""

    def __init__(self, place: Place, part: Split, clock: _Clock) -> None:
        self.place, self.module, self.clock = place, part.module, clock
        self.ops = f"{part.path} {type(part.module).__name__}"

    def __call__(self, x: Tensor) -> Any:
        clock, span = self.clock, _Span(self.place, "backward", self.ops)
        if x.requires_grad and torch.is_grad_enabled():
            x = x.view_as(x)  # so that the hook is on nobody else's tensor
            x.register_hook(lambda gradient: clock.stop(span, time.perf_counter()))
        start = time.perf_counter()
        y = self.module(x)
        clock.spans.append((_Span(self.place, "forward", self.ops), start, time.perf_counter()))
        if isinstance(y, Tensor) and y.requires_grad:
            y = y.view_as(y)
            y.register_hook(lambda gradient: clock.start(span))
        return y


def _own_times(spans: list[tuple[_Span, float, float]]) -> dict[_Span, float]:
    """Seconds of each span, without those of the blocks inside of it; a chain is not lessened by its own steps."""
    own: defaultdict[_Span, float] = defaultdict(float)
    around: list[tuple[_Span, float]] = []
    for span, start, end in sorted(spans, key=lambda found: (found[1], -found[2])):
        while around and around[-1][1] <= start:
            around.pop()
        own[span] += end - start
        if around and around[-1][0].place != span.place:
            own[around[-1][0]] -= end - start
        around.append((span, end))
    return dict(own)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def copy_rate() -> float:
    """Bytes per second that a copy of a large tensor reads and writes, at its best of ten."""
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(11):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * COPIED / best
