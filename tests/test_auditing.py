"""`fusible.audit`: a planted fault is found by name, masks are the same, and the caller's things stay as they are."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import fusible
from fusible import Grads, Op, Out, Saved, backward, forward, kernels, ops, reads_for, segments
from fusible.ops import GELU, BasicLinear, Bias


@backward
def scaled_gradient(linear: BasicLinear, bias: Bias, /, linear_saved, bias_saved, dy, weight, b):
    dw = kernels.dgemm_weight(dy, linear_saved.x)
    return Grads(kernels.dgemm_x(dy, weight) * 1.001, linear={"weight": dw}, bias={"bias": kernels.dbias(dy)})


@backward
def wrong_weight_gradient(linear: BasicLinear, bias: Bias, /, linear_saved, bias_saved, dy, weight, b):
    dw = kernels.dgemm_weight(dy, linear_saved.x)
    return Grads(kernels.dgemm_x(dy, weight), linear={"weight": dw * 1.001}, bias={"bias": kernels.dbias(dy)})


@forward
def wrong_gelu(bias: Bias, act: GELU, /, x, b):
    return Out(torch.nn.functional.gelu(x + b, approximate="tanh"), act=GELU.Saved(x + b))


@forward
def wrong_record(bias: Bias, act: GELU, /, x, b):
    return Out(torch.nn.functional.gelu(x + b), act=GELU.Saved((x + b) * 1.001))


def block(**options) -> fusible.Sequential:
    residual = ops.Residual(ops.RMSNorm(16), ops.Linear(16, 24), ops.GELU(), ops.Dropout(0.4), ops.Linear(24, 16))
    return fusible.Sequential(residual, **options)


class Model(torch.nn.Module):
    """Two blocks, one of them split by a module that is no op, and modules outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 16)
        self.mlp = block()
        self.head = fusible.Sequential(torch.nn.Linear(16, 16), torch.nn.Softplus(), torch.nn.Linear(16, 5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens, scale=None):
        self.calls += 1
        x = self.mlp(torch.tanh(self.embedding(tokens)))
        return {"logits": self.head(x if scale is None else x * scale)}


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


FAULTS = [
    (scaled_gradient, "backward", "0.4 BasicLinear", "gradient of x"),
    (wrong_weight_gradient, "backward", "0.4 BasicLinear", "gradient of weight"),
    (wrong_gelu, "forward", "0.2 GELU", "output"),
    (wrong_record, "forward", "0.2 GELU", "record x"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("rule", "direction", "op", "value"), FAULTS, ids=lambda v: getattr(v, "name", ""))
def test_a_planted_fault_is_found_by_name(rule, direction, op, value):
    made = fusible.audit(block(rules=(rule,)), x(8, 16))
    assert not made.ok
    first = made.first
    assert (first.direction, first.op, first.value, first.rule) == (direction, op, value, rule.name)
    assert f"the first: {direction}, {op}: {value}, rule {rule.name} (fused" in str(made)


@pytest.mark.quick
def test_a_planted_fault_is_found_in_one_block_of_a_model():
    model = Model()
    with fusible.use_rules((scaled_gradient, *fusible.rules.DEFAULT)):
        made = fusible.audit(model, torch.randint(0, 10, (4, 7)))
    assert (made.first.block, made.first.op, made.first.rule) == ("head", "2 BasicLinear", "scaled_gradient")
    assert all(row.ok for row in made.rows if row.direction == "forward")


@pytest.mark.quick
@pytest.mark.parametrize("rules", [fusible.rules.NONE, fusible.rules.DEFAULT, fusible.rules.LEAN], ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_right_passes_with_the_same_masks(rules, dtype):
    with fusible.use_rules(rules):
        made = fusible.audit(block().to(dtype), x(8, 16).to(dtype).detach().requires_grad_())
    assert made.ok, made
    dropped = next(row for row in made.rows if "Dropout" in row.op and row.direction == "forward")
    assert dropped.plain_rms < 0.02  # another mask would give about 1
    assert made.worst.excess == max(row.excess for row in made.rows if row.excess is not None)


@pytest.mark.quick
def test_each_visible_result_has_a_row_in_chain_order():
    made = fusible.audit(fusible.Sequential(ops.Linear(16, 24), ops.GELU(), ops.Tanh()), x(8, 16))
    rows = [(row.direction, row.op, row.value, row.fused_max is None) for row in made.rows]
    forward = [row[1:] for row in rows if row[0] == "forward"]
    assert forward == [("", "input", False), ("0 BasicLinear", "output", True), ("0 Bias", "output", False),
                       ("1 GELU", "output", False), ("2 Tanh", "output", False), ("", "output 0", False)]  # fmt: skip
    gradients = [row[1:3] for row in rows if row[0] == "backward"]
    assert gradients == [
        ("2 Tanh", "gradient of its output"), ("2 Tanh", "gradient of x"), ("1 GELU", "gradient of x"),
        ("0 Bias", "gradient of bias"), ("0 Bias", "gradient of x"),
        ("0 BasicLinear", "gradient of weight"), ("0 BasicLinear", "gradient of x"), ("", "gradient of input 0"),
    ]  # fmt: skip


@pytest.mark.quick
def test_a_model_has_rows_for_blocks_outputs_and_parameters_outside():
    made = fusible.audit(Model(), torch.randint(0, 10, (4, 7)), scale=x(4, 7, 16))
    assert made.ok, made
    assert {row.block for row in made.rows} == {"", "mlp", "head"}
    outside = [row.value for row in made.rows if not row.block]
    assert outside == ["output 0", "gradient of input 1", "gradient of embedding.weight"]
    assert [row.value for row in made.rows if row.block == "head" and not row.op] == ["input", "input"]


@pytest.mark.quick
def test_a_block_called_twice_has_rows_for_each_call():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = fusible.Sequential(ops.Linear(8, 8), ops.Tanh())

        def forward(self, x):
            return self.body(self.body(x))

    made = fusible.audit(Twice(), x(4, 8))
    assert made.ok, made
    assert {row.call for row in made.rows if row.block} == {1, 2}
    assert "body (call 2)" in str(made)
    directions = [(row.direction, row.call) for row in made.rows if row.block]
    assert list(dict.fromkeys(directions)) == [("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1)]


@pytest.mark.quick
def test_a_chain_that_is_cut_into_several_nodes_has_the_same_rows(monkeypatch):
    def audited():
        torch.manual_seed(0)
        chain = fusible.Sequential(*[block()[0] for _ in range(3)], rules=(scaled_gradient,))
        assert (len(chain(x(8, 16)).grad_fn.next_functions) < 12) is cut
        return fusible.audit(chain, x(8, 16))

    cut = False
    whole = audited()
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    cut = True
    parts = audited()
    assert [(r.direction, r.op, r.value, r.fused_max) for r in parts.rows] == [
        (r.direction, r.op, r.value, r.fused_max) for r in whole.rows]  # fmt: skip
    assert parts.first.op == "2.4 BasicLinear"


@pytest.mark.quick
def test_random_ops_draw_the_same_numbers_in_float64():
    class Jitter(Op):
        def reference(self, x):
            return x * torch.randn_like(x) + torch.empty_like(x).uniform_()

    made = fusible.audit(fusible.Sequential(Jitter(), ops.GELU()), x(8, 16))
    assert made.ok
    assert max(row.plain_max for row in made.rows) < 1e-5


@pytest.mark.quick
def test_the_callers_things_stay_as_they_are():
    model, given = Model(), torch.randint(0, 10, (4, 7))
    model(given)["logits"].sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    scale = x(4, 7, 16)
    parts = [list(b.resolved().parts) for b in (model.mlp, model.head)]
    state = torch.get_rng_state()
    fusible.audit(model, given, scale=scale)
    assert torch.equal(torch.get_rng_state(), state)
    assert scale.grad is None
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert [list(b.resolved().parts) for b in (model.mlp, model.head)] == parts
    assert fusible.executable.OBSERVE is None


@pytest.mark.quick
def test_without_gradients_there_is_no_backward():
    with torch.no_grad():
        made = fusible.audit(block(), x(8, 16))
    assert {row.direction for row in made.rows} == {"forward"}


@pytest.mark.quick
def test_autocast_sets_what_can_be_expected():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = fusible.audit(block(), x(8, 16))
    assert made.ok
    assert max(row.plain_max for row in made.rows) > 1e-4


@pytest.mark.quick
def test_not_a_number_in_another_place_is_beyond():
    class Planted(Op):
        class Saved(Saved):
            x: torch.Tensor = reads_for("x")

        def reference(self, x):
            return x * 2

        def fwd(self, x):
            y = x * 2
            y[0, 0] = float("nan")
            return Out(y, saved=self.Saved(x))

        def bwd(self, saved, dy):
            return Grads(dy * 2)

    made = fusible.audit(fusible.Sequential(Planted()), x(8, 16))
    assert made.first.op == "0 Planted"
    assert made.first.excess == float("inf")


@pytest.mark.quick
def test_it_shows_as_text_as_a_table_and_as_data(tmp_path):
    made = fusible.audit(Model(), torch.randint(0, 10, (4, 7)))
    lines = str(made).splitlines()
    assert lines[0] == made.title == "Model against float64"
    assert lines[2].split() == ["pass", "block", "op", "value", "rule", "plain", "max", "rms", "fused", "max", "rms",
                                "ratio", "tolerance"]  # fmt: skip
    assert lines[-1].startswith("fused is within tolerance everywhere; nearest to it: ")
    assert made._repr_html_().count("<tr>") == len(made.rows) + 1
    data = json.loads(json.dumps(made.to_dict()))
    assert data["ok"] is True
    assert len(data["rows"]) == len(made.rows)
    made.plot(tmp_path / "growth.svg")
    picture = (tmp_path / "growth.svg").read_text()
    assert "<svg" in picture


@pytest.mark.quick
def test_a_bar_shows_on_a_terminal_when_it_takes_long(monkeypatch, capsys):
    import fusible._progress as module

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fusible.audit(block(), x(8, 16))
    assert capsys.readouterr().err == ""  # a short one shows nothing
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fusible.audit(block(), x(8, 16))
    assert "audit of Sequential" in capsys.readouterr().err


@pytest.mark.quick
def test_what_cannot_be_audited():
    with pytest.raises(ValueError, match=r"^audit: Linear contains no fusible.Sequential, so nothing in it is fused;"):
        fusible.audit(torch.nn.Linear(4, 4), x(3, 4))
    with pytest.raises(TypeError, match=r"^audit: model must be a torch.nn.Module, got function; pass the model"):
        fusible.audit(lambda x: x, x(3, 4))
    with pytest.raises(ValueError, match=r"weight has 16 elements but x's last dimension is 15"):
        fusible.audit(block(), x(3, 15))

    class Narrow(Model):
        def forward(self, tokens):
            return self.head(self.embedding(tokens) @ torch.ones(16, 16))

    with pytest.raises(RuntimeError, match=r"^audit: Narrow cannot run in float64: .*; register tensors that it keeps"):
        fusible.audit(Narrow(), torch.randint(0, 10, (4, 7)))

    class Silent(Model):
        def forward(self, tokens):
            super().forward(tokens)

    with pytest.raises(TypeError, match=r"^audit: Silent must return tensors, it returned none$"):
        fusible.audit(Silent(), torch.randint(0, 10, (4, 7)))
