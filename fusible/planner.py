"""From a chain, rules and one kind of call to a `Plan`: the steps of both passes, and what is kept between them.

Nothing here runs per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

from fusible.chain import Chain, Node
from fusible.graph_op import graph_bwd, graph_fwd
from fusible.infer import Specs
from fusible.op import Env, Names, Op, check_kind, has_kernels, takes
from fusible.plan import Call, Plan, Step, params_read_by
from fusible.rule import BACKWARD, FORWARD, REWRITE, Match, Miss, Refusal, cover
from fusible.segments import find_cuts

__all__ = ["make_plan"]


def make_plan(chain: Chain, sources: Sequence[tuple[dict, str]], call: Call) -> Plan:
    """Plans one kind of call. `sources` says where each of `call.params` comes from.

    Raises `ValueError` on inputs that do not fit, `TypeError` on ops and rules that break their contract.
    """
    plan = Plan(chain, call.rules, call.recipe, call.autocast, call.inputs[0].device)
    numbers = _number_params(plan, sources)
    specs = Specs(chain.nodes, call.autocast)
    inputs = dict(zip(chain.inputs, call.inputs, strict=True))
    plan.specs = specs.propagate(inputs)
    plan.varying = specs.varying(inputs, plan.specs, chain.lengths)
    _skip(plan, numbers)
    plan.finish()
    tensors = zip(plan.inputs, (*call.inputs, *call.params), strict=True)
    plan.dtypes = {value: spec and spec.dtype for value, spec in plan.specs.items()}
    plan.dtypes.update((value, tensor.dtype) for value, tensor in tensors if tensor is not None)
    builder = _Builder(plan, call)
    builder.find_wanted()
    if builder.apply_rewrites(numbers):
        builder.find_wanted()
    builder.cover_backward()
    builder.cover_forward()
    builder.cut()
    return plan


def _number_params(plan: Plan, sources: Sequence[tuple[dict, str]]) -> dict[tuple[int, str], int]:
    """Values for the parameters, behind all others."""
    made = [value for node in plan.chain.nodes for value in node.outs]
    first = max([*made, *plan.chain.inputs]) + 1
    values = range(first, first + len(sources))
    plan.inputs = (*plan.chain.inputs, *values)
    return {(id(owner), name): value for (owner, name), value in zip(sources, values, strict=True)}


def _param_values(op: Op, numbers: dict[tuple[int, str], int]) -> tuple[int, ...]:
    return tuple(numbers[id(owner), name] for owner, name in op.sources())


def _skip(plan: Plan, numbers: dict[tuple[int, str], int]) -> None:
    """Leaves out the ops that do nothing; what they would make is what they take."""
    same: dict[int, int] = {}
    nodes: list[Node] = []
    skipped: list[Node] = []
    for node in plan.chain.nodes:
        ins = tuple(None if v is None else same.get(v, v) for v in node.ins)
        if node.op.is_identity():
            same[node.outs[0]] = ins[0]  # type: ignore[assignment]
            skipped.append(node)
        else:
            nodes.append(node._replace(ins=ins))
    plan.nodes, plan.skipped = tuple(nodes), tuple(skipped)
    plan.outputs = tuple(same.get(value, value) for value in plan.chain.outputs)
    plan.params = {index: _param_values(node.op, numbers) for index, node in enumerate(nodes)}


class _Builder:
    """Chooses a plan's steps."""

    def __init__(self, plan: Plan, call: Call) -> None:
        self.plan = plan
        self.call = call

    # -- needs -------------------------------------------------------------------------------------------------------

    def find_wanted(self) -> None:
        """Marks the values whose gradient is wanted: inputs and parameters that require grad, and what depends on
        them."""
        plan, call = self.plan, self.call
        tensors = zip(plan.inputs, (*call.inputs, *call.params), strict=True)
        wanted = {value for value, tensor in tensors if call.wants_grad(tensor)}
        for index, node in enumerate(plan.nodes):
            if wanted.intersection((*node.ins, *plan.params[index])):
                wanted |= {value for value in node.outs if self._floating(value)}
        plan.wanted = frozenset(wanted)

    def _floating(self, value: int) -> bool:
        spec = self.plan.specs.get(value)
        return spec is None or spec.dtype.is_floating_point or spec.dtype.is_complex

    # -- steps -------------------------------------------------------------------------------------------------------

    def apply_rewrites(self, numbers: dict[tuple[int, str], int]) -> bool:
        plan = self.plan
        nodes: list[Node] = []
        names: list[str] = []
        for found in self._cover(REWRITE, plan.nodes):
            if isinstance(found, Step):
                nodes.append(_rewritten(found))
                names.append(f"{found.name}: {', '.join(str(node) for node in found.nodes)}")
            else:
                nodes.append(found)
        if not names:
            return False
        plan.nodes, plan.rewritten = tuple(nodes), tuple(names)
        try:
            plan.params = {index: _param_values(node.op, numbers) for index, node in enumerate(nodes)}
        except KeyError:
            raise TypeError(
                f"rewrites ({'; '.join(names)}): the new op may only borrow its slots' parameters"
            ) from None
        plan.finish()
        return True

    def cover_backward(self) -> None:
        plan = self.plan
        live = plan.live
        plan.kept = {plan.index(node): self._kept(node) for node in live}
        steps = []
        for found in self._cover(BACKWARD, tuple(live)):
            step = found if isinstance(found, Step) else self._own_step(found, "bwd")
            self._forget(step)
            steps.append(step)
        plan.backward_steps = tuple(steps)
        plan.read = self._params_read(steps)
        accumulating = [node for node in live if node.op.accumulate_into_main_grad]
        params = {value for node in accumulating for value in plan.params[plan.index(node)]}
        plan.accumulated = frozenset(params & plan.wanted)

    def cover_forward(self) -> None:
        found = self._cover(FORWARD, self.plan.nodes)
        self.plan.forward_steps = tuple(s if isinstance(s, Step) else self._own_step(s, "fwd") for s in found)

    def cut(self) -> None:
        params = zip(self.plan.inputs[len(self.call.inputs) :], self.call.params, strict=True)
        wanted = {value: tensor for value, tensor in params if tensor is not None and value in self.plan.wanted}
        self.plan.cuts = find_cuts(self.plan, {v: t.numel() * t.element_size() for v, t in wanted.items()})

    def _cover(self, direction: str, nodes: tuple[Node, ...]) -> list[Step | Node]:
        """Rule steps and the nodes that no rule took; near misses go to the plan."""
        plan = self.plan
        rules = self.call.rules.of(direction)
        result: list[Step | Node] = []
        for found in cover(rules, [node.op for node in nodes], lambda match: self._refusals(match, nodes)):
            if isinstance(found, Miss):
                plan.misses += ((direction, found, nodes[found.start : found.stop]),)
            elif isinstance(found, Match):
                result.append(self._rule_step(found, nodes))
            else:
                result.append(nodes[found])
        return result

    def _refusals(self, match: Match, nodes: tuple[Node, ...]) -> list[Refusal]:
        run = nodes[match.start : match.stop]
        if self.plan.specs.get(run[0].ins[0]) is None or self.plan.specs.get(run[-1].outs[0]) is None:  # type: ignore[arg-type]
            specs = self.plan.specs
            blind = next(node for node in self.plan.nodes if any(specs.get(value) is None for value in node.outs))
            reason = f"shapes behind {blind} are unknown, as its formula cannot be asked without data"
            return [Refusal(reason, f"give {type(blind.op).__name__} a method infer")]
        made = {value: node for node in run for value in node.outs[1:]}
        for node in run:
            for value in node.ins[1:]:
                if value in made:
                    return [Refusal(f"{node} reads what {made[value]} makes inside the run")]
        step = self._rule_step(match, nodes)
        reasons = match.rule.refusals([node and node.op for node in step.slots], step.env)
        if match.rule.direction == BACKWARD:
            reasons += self._backward_refusals(step)
        return reasons

    def _backward_refusals(self, step: Step) -> list[Refusal]:
        """A rule that forgets must apply whichever gradients arrive, since forward has dropped what others would read.

        Where dy does not arrive the ops run one by one, and those behind the last extra output get no gradient.
        """
        assert step.rule is not None
        making = [place for place, node in enumerate(step.nodes) if len(node.outs) > 1]
        if not step.rule.forgets or not making:
            return []
        dy, *extras = step.rule.optional_gradients()
        forgetful = {slot for slot, _ in step.rule.forgets}
        slots = zip(step.rule.slots, step.slots, strict=True)
        reached = any(node in step.nodes[: making[-1] + 1] for slot, node in slots if slot.name in forgetful)
        if all(extras) and (dy or not reached):
            return []
        return [
            Refusal("it forgets a record, but some gradient that it wants may not arrive", "let that default to None")
        ]

    def _rule_step(self, match: Match, nodes: tuple[Node, ...]) -> Step:
        rule = match.rule
        run = nodes[match.start : match.stop]
        slots = tuple(None if place is None else nodes[place] for place in match.places)
        named = {slot.name: node for slot, node in zip(rule.slots, slots, strict=True)}
        env = self._env(run, named)
        ops = [node and node.op for node in slots]
        function = _with_env(rule.function, env) if rule.takes_env else rule.function
        return Step(run, rule, slots, env, functools.partial(function, *ops), rule.takes_into)

    def _own_step(self, node: Node, method: str) -> Step:
        env = self._env((node,), None)
        into = False
        if has_kernels(type(node.op)):
            function = getattr(node.op, method)
            into = takes(function, "into")
            if takes(function, "env"):
                function = _with_env(function, env)
        else:
            function = graph_fwd(node.op, env, str(node)) if method == "fwd" else graph_bwd(node.op, env)
        return Step((node,), None, (node,), env, function, into)

    # -- env and records ---------------------------------------------------------------------------------------------

    def _env(self, run: tuple[Node, ...], named: dict[str, Node | None] | None) -> Env:
        plan, call = self.plan, self.call
        first, last = plan.specs.get(run[0].ins[0]), plan.specs.get(run[-1].outs[0])  # type: ignore[arg-type]
        extras = [plan.specs.get(v) for node in run for v in node.ins[1:] if v is not None]
        needs, keeps = self._names(run[0], named)
        return Env(
            dtype=first.dtype if first else call.inputs[0].dtype,
            device=plan.device,
            width=first.width if first and first.shape and run[0].ins[0] not in plan.varying else None,
            out_dtype=last.dtype if last else call.inputs[0].dtype,
            extras=tuple(spec.dtype if spec else call.inputs[0].dtype for spec in extras),
            needs=needs,
            keeps=keeps,
            grad_enabled=call.grad_enabled,
            autocast=call.autocast,
            recipe=call.recipe,
            backend=call.backend,
        )

    def _names(self, first: Node, named: dict[str, Node | None] | None) -> tuple[Names, Names]:
        plan = self.plan
        if named is None:
            op = type(first.op)
            kept = frozenset(plan.kept.get(plan.index(first), ()))
            return Names(plan.needs(first), frozenset(op.signature.gradients)), Names(kept, frozenset(op.Saved.fields))
        needs, known, kept_names, fields = set(), {"x"}, set(), set()
        if "x" in plan.needs(first):
            needs.add("x")
        for slot, node in named.items():
            if node is None:
                continue
            own = type(node.op).signature
            known |= {f"{slot}.{name}" for name in (*own.extras, *own.params)}
            needs |= {f"{slot}.{name}" for name in plan.needs(node) if name != "x"}
            fields |= {f"{slot}.{name}" for name in type(node.op).Saved.fields}
            kept_names |= {f"{slot}.{name}" for name in plan.kept.get(plan.index(node), ())}
        return Names(frozenset(needs), frozenset(known)), Names(frozenset(kept_names), frozenset(fields))

    def _kept(self, node: Node) -> tuple[str, ...]:
        """The record fields that a wanted gradient reads."""
        if not has_kernels(type(node.op)):
            return ("graph",)
        needs, readers = self.plan.needs(node), type(node.op).Saved.readers
        return tuple(name for name, grads in readers.items() if grads is None or grads & needs)

    def _forget(self, step: Step) -> None:
        if step.rule is None:
            return
        for slot, name in step.rule.forgets:
            for place, node in zip(step.rule.slots, step.slots, strict=True):
                if place.name == slot and node is not None:
                    index = self.plan.index(node)
                    self.plan.kept[index] = tuple(kept for kept in self.plan.kept[index] if kept != name)

    def _params_read(self, steps: list[Step]) -> tuple[int, ...]:
        """Values of the parameters that some backward step reads, as declared by `reads_for`."""
        read: dict[int, None] = {}
        for step in steps:
            if step.rule and any(len(node.outs) > 1 for node in step.nodes):
                self.plan.op_by_op[step] = tuple(self._own_step(node, "bwd") for node in step.nodes)
            for part in (step, *self.plan.op_by_op.get(step, ())):
                read.update((value, None) for value, _ in params_read_by(self.plan, part))
        present = {value for value, t in zip(self.plan.inputs[len(self.call.inputs) :], self.call.params, strict=True)
                   if t is not None}  # fmt: skip
        return tuple(value for value in read if value in present)


def _with_env(function: Callable[..., Any], env: Env) -> Callable[..., Any]:
    """`function` with its keyword `env` given, as a copy's default: a `functools.partial` costs more at each call."""
    if isinstance(function, MethodType):
        return MethodType(_with_env(function.__func__, env), function.__self__)
    if not isinstance(function, FunctionType) or "env" not in _keywords(function):
        return functools.partial(function, env=env)
    parts = function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copy = FunctionType(*parts)
    copy.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "env": env}
    return copy


def _keywords(function: FunctionType) -> tuple[str, ...]:
    """The keyword-only arguments that a function itself has, not one that it wraps."""
    code = function.__code__
    return code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]


def _rewritten(step: Step) -> Node:
    """The node that a rewrite puts in the place of its run."""
    assert step.rule is not None
    op = step.rule.function(*[node and node.op for node in step.slots])
    if not isinstance(op, Op):
        raise TypeError(f"{step}: a rewrite must return an op, got {op!r}")
    kind: Any = type(op)
    check_kind(kind, kind.signature.params)
    first, last = step.nodes[0].path, step.nodes[-1].path
    ins = (step.nodes[0].ins[0], *(value for node in step.nodes for value in node.ins[1:]))
    outs = (step.nodes[-1].outs[0], *(value for node in step.nodes for value in node.outs[1:]))
    if len(ins) != 1 + op.num_extra_inputs or len(outs) != 1 + op.num_extra_outputs:
        raise TypeError(
            f"{step}: {type(op).__name__} must have {len(ins) - 1} extra inputs and {len(outs) - 1} extra outputs, as "
            f"the ops it replaces, got {op.num_extra_inputs} and {op.num_extra_outputs}"
        )
    path = first if first == last else f"{first}-{last}"
    return Node(op, path, f"{type(op).__name__} (op {path})", ins, outs)
