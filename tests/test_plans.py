"""What `explain` prints, against stored text in `plans/`; `pytest --update-plans` writes it anew. Read it then."""

from __future__ import annotations

import pathlib

import pytest
import torch
from blocks import BLOCKS, make
from torch import nn

from fusible import Op, Sequential, kernels, ops, rules, use_rules

pytestmark = pytest.mark.quick

PLANS = pathlib.Path(__file__).parent / "plans"
F32 = torch.float32


class Softmax(Op):
    """An op that only has its formula."""

    def reference(self, x):
        return x.softmax(-1)


class Hidden(Op):
    """An op whose shapes cannot be told without data."""

    def reference(self, x):
        return x[..., : int(x.detach().sum() * 0) + 4]


def wide(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def explained(block: Sequential, *inputs: torch.Tensor, **named: torch.Tensor) -> str:
    with kernels.use("reference"):  # the same text on every machine
        return str(block.explain(*inputs, **named))


def standard(name: str) -> str:
    count = 3 if name == "extras" else 1
    targets = [torch.zeros(64, dtype=torch.int64)] if name == "loss" else []
    return explained(make(name, dtype=F32), *[wide(64, 8) for _ in range(count)], *targets)


def frozen() -> str:
    block = make("mlp", dtype=F32)
    for parameter in block[0][1].parameters():
        parameter.requires_grad_(False)
    return explained(block, torch.ones(64, 8))


def no_grad() -> str:
    with torch.no_grad():
        return explained(make("mlp", dtype=F32), wide(64, 8))


def autocast() -> str:
    with torch.autocast("cpu", torch.bfloat16):
        return explained(make("mlp", dtype=F32), wide(64, 8))


def lean() -> str:
    return explained(make("mlp", rules.LEAN, F32), wide(64, 8))


def rewritten() -> str:
    return explained(make("gated_mlp", (rules.gated_mlp, *rules.DEFAULT), F32), wide(64, 8))


def none() -> str:
    with use_rules(rules.NONE):
        return explained(make("relu_mlp", dtype=F32), wide(64, 8))


def mixed() -> str:
    return explained(Sequential(ops.Linear(8, 8).bfloat16(), ops.Residual(ops.Linear(8, 8))), wide(64, 8))


def reference_only() -> str:
    return explained(Sequential(ops.Linear(8, 8), Softmax(), ops.GELU()), wide(64, 8))


def unknown_shapes() -> str:
    return explained(Sequential(ops.Linear(8, 8), Hidden(), ops.Linear(4, 4), ops.ReLU()), wide(64, 8))


def hooks() -> str:
    block = make("mlp", dtype=F32)
    block[0][2].register_forward_hook(lambda *args: None)
    return explained(block, wide(64, 8))


def shared_input() -> str:
    block = Sequential(ops.AddExtraInput("positions"), ops.Linear(8, 8), inputs=("positions",))
    return explained(block, wide(64, 8), positions=torch.ones(64, 8))


def without_x() -> str:
    return explained(make("gated_mlp", dtype=F32))


def own_rules_inside() -> str:
    return explained(Sequential(ops.Linear(8, 8), Sequential(ops.Tanh(), rules=rules.NONE), ops.GELU()), wide(64, 8))


def identities() -> str:
    return explained(Sequential(ops.Identity(), ops.Dropout().eval()), wide(64, 8))


OTHERS = [
    frozen, no_grad, autocast, lean, rewritten, none, mixed, reference_only, unknown_shapes, hooks, shared_input,
    without_x, own_rules_inside, identities,
]  # fmt: skip
TEXTS = {**{name: lambda name=name: standard(name) for name in BLOCKS}, **{text.__name__: text for text in OTHERS}}


@pytest.mark.parametrize("name", TEXTS)
def test_a_plan_reads_as_stored(name, request):
    path = PLANS / f"{name}.txt"
    text = TEXTS[name]() + "\n"
    if request.config.getoption("--update-plans"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs: read the new text, then run pytest --update-plans"


def test_no_stored_plan_is_left_over():
    assert {path.stem for path in PLANS.glob("*.txt")} == set(TEXTS)


def test_nothing_is_run():
    """No row: a block whose every op would raise if it ran on data."""

    class Raises(Op):
        def reference(self, x):
            assert not type(x) is torch.Tensor, "it ran"  # noqa: E714 - a fake tensor is a subclass
            return x * 2

    x = wide(4, 8)
    state = torch.get_rng_state()
    block = Sequential(ops.Dropout(0.5), Raises(), nn.Softplus(), ops.Dropout(0.5))
    text = str(block.explain(x))
    assert "Raises" in text
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    with pytest.raises(AssertionError, match="it ran"):
        block(x)


def test_what_is_kept_is_what_a_call_keeps():
    """No row: bytes of the explanation against those of the node's records."""
    for name in BLOCKS:
        block = make(name, dtype=F32)
        if name in ("split", "channels"):
            continue
        inputs = [wide(64, 8) for _ in range(3 if name == "extras" else 1)]
        inputs += [torch.zeros(64, dtype=torch.int64)] if name == "loss" else []
        with kernels.use("reference"):
            said = block.explain(*inputs).kept_bytes
            outs = block(*inputs)
            node = (outs[0] if isinstance(outs, tuple) else outs).grad_fn
        theirs = {t.untyped_storage().data_ptr() for t in (*inputs, *block.parameters())}
        places = [fields for _, _, fields, _ in node.call[2]]
        tensors = [t for record in (*node.call[1], *places) for t in record or () if isinstance(t, torch.Tensor)]
        tensors += list(node.saved_tensors)
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(size for address, size in kept.items() if address not in theirs) == said, name


def test_as_data_and_as_a_table():
    """No row: the same facts, not as text."""
    explanation = make("split", dtype=F32).explain(wide(64, 8))
    page = explanation._repr_html_()
    assert page.count("<table>") == page.count("</table>") >= 6
    for part in explanation.parts:
        assert part.title in page
        for row in (*part.forward, *part.backward):
            assert row.ops in page
            assert row.kernels
    assert "<script" not in Sequential(nn.Softplus()).explain(wide(2, 2))._repr_html_()
    assert explanation.kept_bytes == sum(row.bytes for part in explanation.parts for row in part.kept)
    assert Sequential(Hidden()).explain(wide(2, 8)).kept_bytes is None


def test_the_source_is_what_runs():
    """No row: the generated functions, as printed, compile and name each step."""
    explanation = make("mlp", dtype=F32).explain(wide(64, 8))
    compile(explanation.source, "<plan>", "exec")
    assert explanation.source.count("def run(") == 2
    for row in (*explanation.parts[0].forward, *explanation.parts[0].backward):
        assert f"# {row.ops}" in explanation.source
