"""`explain` grown up: costs, models, changes, data and graph; calibration files; the commands on them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fusible
from fusible import Op, Sequential, calibration, cli, costs, kernels, ops, rules
from fusible.calibration import Calibration

pytestmark = pytest.mark.quick

MACHINE = Calibration({}, "", ((1.0, 1e9),), ((1.0, 5e8),), {"float32": ((1.0, 1e10),)}, {}, 1e-6)


def mlp() -> Sequential:
    return Sequential(ops.Residual(ops.RMSNorm(8), ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8)))


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(10, 8), middle
        self.layers = nn.ModuleList([mlp() for _ in range(3)])
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        x = self.embed(tokens)
        x = self.layers[0](x)
        x = self.middle(x)
        return self.layers[2](self.layers[1](x))


class Refuses(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


TOKENS = torch.zeros(2, 5, dtype=torch.long)


def test_bytes_count_each_memory_once():
    x = torch.ones(4, 6)
    assert costs.moved((x, x, x[:, :3]), x + 1) == (96, 96)
    assert costs.moved((x[:, :3], x[:, 3:]), x + 1) == (96, 96)
    assert costs.moved(x[0].expand(100, 6), torch.ones(100, 6)) == (24, 2400)
    assert costs.moved(x, (x, x.view(24))) == (0, 0)


def test_flops_of_products_also_in_kernels_and_attention():
    found: list[costs.Ran] = []

    def step(x, w):
        y = kernels.relu_(kernels.gemm_bias(x, w, meta(3)))
        return torch.nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])

    costs.watched(step, "cpu", found.append)(meta(5, 4), meta(3, 4))
    assert found[0].cost.flops == 2 * 5 * 4 * 3 + 4 * 5 * 5 * 3
    assert next(work.flops for work in found[0].cost.work if work.flops) == 120


def test_times_are_predicted_by_a_calibration():
    x = torch.ones(64, 8, requires_grad=True)
    with calibration.use(MACHINE), kernels.use("reference"):
        explanation = mlp().explain(x)
    norm = explanation.parts[0].forward[1]
    assert norm.floor == pytest.approx((norm.read + norm.written) / 1e9)
    assert norm.seconds >= norm.traffic / 5e8
    product = explanation.parts[0].forward[2]
    assert product.seconds == pytest.approx(1e-6 + max(product.flops / 1e10, product.traffic / 5e8))
    assert "not calibrated" not in str(explanation)
    assert explanation.to_dict()["totals"]["forward"]["seconds"] == pytest.approx(
        sum(row.seconds for row in explanation.parts[0].forward)
    )


def test_a_model_is_listed_block_by_block_and_not_run():
    model = Model(nn.Softplus())
    model.layers[1].register_forward_hook(lambda *a: None)
    explanation = fusible.explain(model, TOKENS)
    assert model.calls == 0
    assert [part.path for part in explanation.parts] == ["layers.0", "layers.1", "layers.2"]
    assert explanation.parts[0].forward[1].inputs[0] == "[2, 5, 8] float32"
    assert "layers.1 has forward hooks" in explanation.parts[2].notes[0]
    assert explanation.parts[2].forward[1].read is None
    assert "layers.0, layers.1, layers.2 (3 alike)" in str(fusible.explain(Model(nn.Softplus()), TOKENS))


def test_no_hook_fires():
    model, fired = Model(nn.Softplus()), []
    for module in model.modules():
        module.register_forward_hook(lambda *a: fired.append(a))
        module.register_forward_pre_hook(lambda *a: fired.append(a))
    fusible.explain(model, TOKENS)
    assert not fired
    handle = nn.modules.module.register_module_forward_hook(lambda *a: fired.append(a))
    try:
        notes = fusible.explain(Model(nn.Softplus()), TOKENS).notes
    finally:
        handle.remove()
    assert not fired
    assert notes == ("no shapes are known: global module hooks are registered, and none may fire",)


def test_behind_a_module_that_needs_data_bytes_are_unknown():
    explanation = fusible.explain(Model(Refuses()), TOKENS)
    known, unknown = explanation.parts[0], explanation.parts[1]
    assert known.forward[1].read is not None
    assert unknown.forward[1].read is None
    assert explanation.kept_bytes is None
    assert "shapes behind middle are unknown, as its forward cannot run without data" in explanation.notes[0]
    json.dumps(explanation.to_dict())


def test_what_a_model_must_be():
    with pytest.raises(TypeError, match=r"^fusible.explain: model must be a torch.nn.Module, got function$"):
        fusible.explain(mlp)
    notes = fusible.explain(nn.Linear(2, 2), torch.ones(1, 2)).notes
    assert notes == ("Linear has no fusible.Sequential inside: nothing can fuse",)


def test_an_op_in_between_is_named_with_the_change():
    block = Sequential(ops.Linear(8, 8), ops.Reshape((-1, 8)), ops.ReLU())
    text = str(block.explain(torch.ones(4, 8, requires_grad=True)))
    assert "Reshape stands between them, Bias and ReLU: put it before Bias, behind ReLU, or leave it out" in text
    block = Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(), ops.ReLU())
    text = str(block.explain(torch.ones(4, 8, requires_grad=True)))
    assert "MakeExtraOutput keeps the tensor between them, Bias and ReLU: hand out what ReLU makes instead" in text


def test_an_absent_bias_is_named_with_the_change():
    @fusible.forward
    def all_three(a: ops.ReLU, linear: ops.BasicLinear, bias: ops.Bias, act: ops.ReLU, /, x, weight, b):
        raise AssertionError

    block = Sequential(ops.ReLU(), ops.Linear(8, 8, bias=False), ops.ReLU(), rules=(all_three,))
    text = str(block.explain(torch.ones(4, 8)))
    assert "Bias is missing inside the run: give the linear layer a bias" in text


def test_as_a_graph():
    class Odd(Op):
        def reference(self, x):
            return x * 2

    chart = Sequential(ops.Linear(4, 4), nn.Softplus(), Odd()).explain(torch.ones(2, 4)).to_mermaid().splitlines()
    assert chart[0] == "flowchart TD"
    assert sum(line.strip() == "end" for line in chart) == sum("subgraph" in line for line in chart)
    assert '  p1[["Softplus (op 1) runs as it is"]]' in chart
    assert "  p0s0o1 --> p1" in chart


# -- calibration files -------------------------------------------------------------------------------------------------


def stored(tmp_path, **changes):
    path = tmp_path / "calibration.json"
    found = Calibration(calibration.machine(), "", MACHINE.reused, MACHINE.fresh, MACHINE.products, {}, 1e-6)
    path.write_text(json.dumps({**found.to_dict(), **changes}))
    return path


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "deep" / "calibration.json"
    found = calibration.load(stored(tmp_path))
    calibration.save(found, path)
    assert calibration.load(path) == found
    assert [entry.name for entry in path.parent.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 0}, "is not a calibration of this version of fusible; run: python -m fusible calibrate"),
        ({"reused": []}, "is not a calibration of this version of fusible"),
        ({"overhead": -1}, "is not a calibration of this version of fusible"),
        ({"machine": {"cpu": "another"}}, "was measured with cpu another, here it is"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(changes, text, tmp_path):
    with pytest.raises(calibration.CalibrationError, match=text):
        calibration.load(stored(tmp_path, **changes))


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSIBLE_CALIBRATION", str(tmp_path / "mine.json"))
    assert calibration.location() == tmp_path / "mine.json"
    monkeypatch.delenv("FUSIBLE_CALIBRATION")
    monkeypatch.setattr(calibration.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.location() == tmp_path / "fusible" / "calibration.json"


def test_rates_between_points():
    machine = Calibration({}, "", ((1e3, 1e9), (1e5, 4e9)), ((1.0, 1.0),), MACHINE.products, {"a": {"float32": 2.0}}, 1)
    assert [machine.memory_rate(size) for size in (1, 10**4, 10**9)] == pytest.approx([1e9, 2e9, 4e9])
    assert machine.factor("a", torch.float32) == 2
    assert machine.factor("b", torch.float32) == machine.factor("a", torch.float16) == 1


# -- commands ----------------------------------------------------------------------------------------------------------

FILE = """
import torch, fusible
from fusible import ops
block = fusible.Sequential(ops.Linear(8, 8), ops.ReLU())
split = fusible.Sequential(ops.Linear(8, 8), torch.nn.Softplus())
example_inputs = torch.ones(3, 8)
number = 3
def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), block)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "target.py"
    path.write_text(FILE)
    return str(path)


def test_explain_as_a_command(file, capsys):
    assert cli.run(["explain", f"{file}:block"]) == 0
    assert capsys.readouterr().out.startswith("Sequential on x [3, 8] float32")
    assert cli.run(["explain", f"{file}:make", "--input", "4x8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["path"] == "1"
    assert cli.run(["explain", f"{file}:block", "--mermaid", "--strict"]) == 0
    assert capsys.readouterr().out.startswith("flowchart TD")
    assert cli.run(["explain", f"{file}:split", "--strict"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}"], "{}: must be FILE.py:OBJECT, as in model.py:block"),
        (["{}:blok"], "{} has no blok; it has block, split"),
        (["{}x:block"], "{}x: no such file"),
        (["{}:number"],
         "{}:number must be a torch.nn.Module, or a function without arguments that returns one, got int"),
        (["{}:block", "--input", "8y"], "--input 8y: must be sizes and perhaps a dtype, as 8x512 or 8x512:bfloat16; "
         "dtypes are float32, bfloat16, float16, float64, int64, int32, bool"),
        (["{}:block", "--input", "2x7"],
         "{}:block: Linear (op 0): weight takes 8 features but x's last dimension is 7 (x: [2, 7])"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments, message, file, capsys):
    assert cli.run(["explain", *[argument.format(file) for argument in arguments]]) == 2
    assert capsys.readouterr().err == f"fusible: {message.format(file)}\n"


def test_rules_know_no_change_where_there_is_none():
    assert rules.NONE == ()
    assert str(fusible.rule.Refusal("why")) == "why"
    assert str(fusible.rule.Refusal("why", "do that")) == "why: do that"
