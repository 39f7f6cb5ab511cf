"""`fusible.profile`: what it times, what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest
import torch

import fusible
from fusible import _progress, calibration, executable, ops, profiling


def block() -> fusible.Sequential:
    return fusible.Sequential(ops.RMSNorm(64), ops.Linear(64, 32), ops.GELU())


@pytest.mark.quick
def test_steps_of_both_passes_with_their_bytes():
    x = torch.randn(100, 64, requires_grad=True)
    made, explained = fusible.profile(block(), x, rounds=2), block().explain(x).parts[0]
    forward = [step for step in made.steps if step.direction == "forward"]
    backward = [step for step in made.steps if step.direction == "backward"]
    for steps, rows in ((forward, explained.forward), (backward, explained.backward)):
        assert [(s.ops, s.rule, s.kernels) for s in steps] == [(r.ops, r.rule, r.kernels) for r in rows]
    norm = forward[0]
    assert norm.bytes == 4 * (2 * 100 * 64 + 64 + 100)  # x, y, weight, rstd
    assert norm.copies == pytest.approx(norm.seconds * made.copy_rate / norm.bytes)
    assert all(step.copies is None for step in made.steps if "BasicLinear" in step.ops)
    assert made.forward > 0
    assert made.backward > 0
    assert made.overhead == pytest.approx(made.forward + made.backward - sum(s.seconds for s in made.steps))


@pytest.mark.quick
def test_without_gradients_there_is_no_backward():
    with torch.no_grad():
        made = fusible.profile(block(), torch.randn(3, 64), rounds=1)
    assert {step.direction for step in made.steps} == {"forward"}
    assert made.backward == 0


@pytest.mark.quick
def test_it_shows_as_text_as_a_table_and_as_data():
    made = fusible.profile(block(), torch.randn(3, 64), rounds=1)
    lines = str(made).splitlines()
    assert lines[0] == made.title
    assert lines[2].split() == ["pass", "ops", "rule", "kernels", "time", "share", "bytes", "copies"]
    assert lines[-3].split()[:2] == ["the", "block"]
    assert made._repr_html_().count("<tr>") == len(made.steps) + 3
    assert json.loads(json.dumps(made.to_dict()))["overhead"] == made.overhead


@pytest.mark.quick
def test_nothing_is_left_behind(monkeypatch):
    monkeypatch.setattr(executable, "CHECK_ALWAYS", False)
    profiled, x = block(), torch.randn(3, 64, requires_grad=True)
    before = profiled(x)
    fusible.profile(profiled, x, rounds=1)
    assert executable.CHECK_ALWAYS is False
    assert executable.OBSERVE is None
    assert torch.equal(profiled(x), before)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in profiled.parameters())


@pytest.mark.quick
def test_the_profiler_of_torch_shows_steps_by_name(monkeypatch):
    monkeypatch.setattr(executable, "CHECK_ALWAYS", False)
    profiled, x = block(), torch.randn(3, 64, requires_grad=True)
    profiled(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        profiled(x).sum().backward()
    shown = {event.key for event in seen.key_averages() if event.key.startswith("fusible ")}
    row = profiled.explain(x).parts[0]
    steps = [("forward", step) for step in row.forward] + [("backward", step) for step in row.backward]
    assert shown == {f"fusible {way}: {s.ops}" + (f": {s.rule}" if s.rule else "") for way, s in steps}


class Model(torch.nn.Module):
    """Two blocks, one of them split, and something outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 64)
        self.body = block()
        self.head = fusible.Sequential(torch.nn.Linear(32, 16), torch.nn.Softplus(), torch.nn.Linear(16, 5))

    def forward(self, tokens):
        return {"logits": self.head(self.body(self.embedding(tokens)))}


@pytest.mark.quick
def test_a_model_has_lines_for_each_block_and_for_everything_else():
    made = fusible.profile(Model(), torch.randint(0, 10, (3, 7)), rounds=2)
    assert [b.block for b in made.blocks] == ["body", "head"]
    assert all(b.forward > 0 and b.backward > 0 for b in made.blocks)
    lines = [(s.block, s.direction, s.ops) for s in made.steps]
    assert lines == [
        ("body", "forward", "0 RMSNorm"), ("body", "forward", "1 BasicLinear, 1 Bias"), ("body", "forward", "2 GELU"),
        *[("body", "backward", s.ops) for s in made.steps if (s.block, s.direction) == ("body", "backward")],
        ("head", "forward", "0 BasicLinear, 0 Bias"), ("head", "forward", "1 Softplus"),
        ("head", "forward", "2 BasicLinear, 2 Bias"),
        ("head", "backward", "2 Bias"), ("head", "backward", "2 BasicLinear"), ("head", "backward", "1 Softplus"),
        ("head", "backward", "0 Bias"), ("head", "backward", "0 BasicLinear"),
    ]  # fmt: skip
    total = sum(s.seconds for s in made.steps) + made.overhead + made.elsewhere
    assert total == pytest.approx(made.forward + made.backward)
    text = [line.split()[0:2] for line in str(made).splitlines()]
    assert ["everything", "else"] in text
    assert ["the", "model"] in text
    assert "the module itself" in str(made)


@pytest.mark.quick
def test_a_module_between_chains_has_a_line_for_each_pass():
    split = fusible.Sequential(ops.Linear(8, 8), torch.nn.Softplus(), ops.Tanh())
    made = fusible.profile(split, torch.randn(3, 8), rounds=1)
    own = [step for step in made.steps if step.kernels == "the module itself"]
    assert [(s.direction, s.ops, s.bytes, s.copies) for s in own] == [
        ("forward", "1 Softplus", None, None), ("backward", "1 Softplus", None, None)]  # fmt: skip
    assert all(s.seconds > 0 for s in own)
    first = fusible.Sequential(torch.nn.Softplus(), ops.Tanh())  # its input needs no gradient
    made = fusible.profile(first, torch.randn(3, 8), rounds=1)
    assert [(s.direction, s.ops) for s in made.steps] == [("forward", "0 Softplus"), ("forward", "1 Tanh")]


@pytest.mark.quick
def test_a_block_inside_a_block_is_counted_once():
    inner = fusible.Sequential(ops.Linear(8, 8), ops.Tanh(), rules=fusible.rules.NONE)
    outer = fusible.Sequential(ops.Linear(8, 8), inner, ops.Tanh())
    spans = [(profiling._Span(profiling.Place("", 1), "forward", "1 Sequential"), 0.0, 10.0),
             (profiling._Span(profiling.Place("1", 0), "forward", ""), 1.0, 8.0),
             (profiling._Span(profiling.Place("1", 0), "forward", "0 Tanh"), 2.0, 4.0)]  # fmt: skip
    own = profiling._own_times(spans)
    assert list(own.values()) == [3.0, 7.0, 2.0]
    made = fusible.profile(outer, torch.randn(3, 8), rounds=1)
    assert {s.block for s in made.steps} == {"", "1"}


def test_steps_make_up_the_time_of_a_large_block():
    """Within one call, so that what else the machine does counts on both sides."""
    large = fusible.Sequential(ops.Residual(ops.RMSNorm(512), ops.Linear(512, 1024), ops.GELU(), ops.Linear(1024, 512)))
    call = profiling._Call(large, (torch.randn(1024, 512, requires_grad=True),), {})
    clock = profiling._Clock(large)
    for _ in range(8):
        with clock.timed(), executable.observed(clock.observe):
            call.run()
    shares = []
    for times in clock.rounds[2:]:
        chain = sum(seconds for span, seconds in times.items() if not span.ops)
        shares.append(sum(seconds for span, seconds in times.items() if span.ops) / chain)
    assert 0.95 < statistics.median(shares) <= 1


@pytest.mark.quick
def test_the_callers_model_is_as_it_was():
    model, tokens = Model(), torch.randint(0, 10, (3, 7))
    parts = [list(b.resolved().parts) for b in (model.body, model.head)]
    fusible.profile(model, tokens, rounds=1)
    assert [list(b.resolved().parts) for b in (model.body, model.head)] == parts
    assert model.body.resolved().single is parts[0][0]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.quick
def test_a_bar_shows_on_a_terminal_when_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fusible.profile(block(), torch.randn(3, 64), rounds=1)
    assert "profile of Sequential" in capsys.readouterr().err


MACHINE = calibration.Calibration({}, "", ((1024.0, 1e9),), ((1024.0, 1e9),), {"float32": ((1e3, 1e10),)}, {}, 0.0)


@pytest.mark.quick
def test_a_calibrated_machine_has_floors_and_roofs(tmp_path):
    with calibration.use(MACHINE):
        made = fusible.profile(block(), torch.randn(100, 64), rounds=1)
    norm, product = made.steps[:2]
    assert norm.floor == pytest.approx(norm.bytes / 1e9)
    assert product.flops == 2 * 100 * 64 * 32
    assert product.floor == pytest.approx(max(product.bytes / 1e9, product.flops / 1e10))
    assert str(made).splitlines()[2].split()[-2:] == ["floor", "floors"]
    assert made.roofs == pytest.approx((1e9, 1e10))
    made.plot(tmp_path / "roof.svg")
    assert "<svg" in (tmp_path / "roof.svg").read_text()
    with calibration.use(None):
        made = fusible.profile(block(), torch.randn(100, 64), rounds=1)
    assert made.steps[0].floor is None
    with pytest.raises(ValueError, match="^plot: the roofs are not known; run python -m fusible calibrate, then"):
        made.plot(tmp_path / "none.svg")


@pytest.mark.quick
def test_what_cannot_be_profiled():
    with pytest.raises(ValueError, match=r"^profile: Linear contains no fusible.Sequential; profile a model that"):
        fusible.profile(torch.nn.Linear(4, 4), torch.randn(3, 4))
    with pytest.raises(ValueError, match="^profile: rounds must be at least 1, got 0$"):
        fusible.profile(block(), torch.randn(3, 64), rounds=0)


def test_it_is_loaded_when_it_is_asked_for():
    names = "('fusible.profiling', 'fusible.auditing', 'rich', 'matplotlib')"
    code = f"import sys, fusible; print([n for n in {names} if n in sys.modules], fusible.profile, fusible.audit)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("[] <function profile")
