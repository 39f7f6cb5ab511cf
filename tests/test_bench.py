"""The benchmark: tiny rows through the same processes, and its judgement of rounds, targets and options."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
import torch

from fusible import cli
from fusible.__main__ import main
from fusible.bench import load, measure, rows
from fusible.bench.blocks import KINDS, make_block, make_inputs, make_output_gradients, make_twin
from fusible.bench.load import Turn
from fusible.bench.main import Options
from fusible.bench.measure import Plan, Probe, play
from fusible.bench.results import Machine, Report, RowResult, Spread, Timing, spread
from fusible.bench.rows import ROWS, Row, Targets
from fusible.demo.config import InputError

NO_TARGETS = Targets()
MACHINE = Machine("0", "2", "3", "here", "a CPU", 1, "C++ kernels", None)


def tiny(kind: str, dtype: str = "float32", **changes) -> Row:
    return Row("tiny", kind, 4, 16, 24 if "mlp" in kind else 0, dtype, **changes)


def result(fusible: float, targets: Targets = NO_TARGETS, kept: int | None = None, **others: float) -> RowResult:
    def timing(ms: float, kept: int | None = None) -> Timing:
        return Timing(Spread(ms / 3, ms / 3, ms / 3), Spread(ms, ms, ms), ms + 1, ms, kept)

    floor = others.pop("floor", None)
    timings = {"fusible": timing(fusible, kept), **{peer: timing(ms, 100) for peer, ms in others.items()}}
    return RowResult(
        tiny("mlp", targets=targets), timings=timings, floor=None if floor is None else timing(floor), rounds=3
    )


@pytest.mark.quick
def test_the_table_has_each_row_once_and_names_only_kinds_that_exist():
    every = (*ROWS, *rows.sweep())
    for table in (ROWS, rows.sweep()):
        assert len({row.name for row in table}) == len(table)
    assert {row.kind for row in every} == set(KINDS)
    assert {row.group for row in ROWS} == {"large", "small", "mlps", "half"}
    assert all(row.targets.eager is not None for row in every)


@pytest.mark.quick
def test_the_sweep_spans_widths_rows_and_dtypes():
    found = rows.sweep()
    assert {row.width for row in found} == {64, 256, 1024, 4096}
    assert {row.tokens for row in found} >= {1, 16384}
    assert {row.dtype for row in found} == {"float32", "bfloat16"}
    assert all(row.variants == ("fusible", "eager") for row in found)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_block_and_twin_are_the_same_function(kind):
    row = tiny(kind)
    block, twin = make_block(row), make_twin(row)
    assert [p.shape for p in block.parameters()] == [p.shape for p in twin.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), twin.parameters(), strict=True))
    assert load.check(block, row) is None
    outs = block.eval()(*make_inputs(row))
    outs = outs if isinstance(outs, tuple) else (outs,)
    right = twin.eval()(*make_inputs(row))
    for out, other, dout in zip(
        outs, right if isinstance(right, tuple) else (right,), make_output_gradients(row), strict=True
    ):
        torch.testing.assert_close(out, other)
        assert dout.shape == out.shape


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["mlp", "dropout-add-layernorm"])
def test_a_wrong_block_is_found(kind, monkeypatch):
    row = tiny(kind)
    block = make_block(row)
    right = type(block).forward
    monkeypatch.setattr(type(block), "forward", lambda self, *inputs: right(self, *inputs) * 1.001)
    assert "output 0 is off by" in load.check(block, row)


@pytest.mark.quick
@pytest.mark.parametrize("row", [tiny("rmsnorm"), tiny("swiglu"), tiny("mlp"), tiny("gated-mlp")], ids=lambda r: r.kind)
def test_each_float32_row_has_one_floor(row):
    floors = [load.copies(row), load.products(row)]
    assert [floor is None for floor in floors] == ([False, True] if "mlp" not in row.kind else [True, False])
    floor = floors[0] or floors[1]
    floor.forward()
    floor.both()
    assert floor.scale == tuple(moved / 2 for moved in KINDS[row.kind].moved) or floor.scale == (1, 1)


@pytest.mark.quick
def test_kept_bytes_of_a_twin_count_each_storage_once_and_no_input():
    class Twice(torch.nn.Linear):
        def forward(self, x):
            y = torch.exp(super().forward(x))  # keeps its result, which is kept once more, as a view
            return y * y.view(8, 4).view(4, 8)

    assert load.kept_bytes(Twice(8, 8), [torch.ones(4, 8, requires_grad=True)]) == 4 * 8 * 4
    assert load.kept_bytes(make_block(tiny("rmsnorm")), make_inputs(tiny("rmsnorm"))) == 4 * 4


# -- rounds and probe --------------------------------------------------------------------------------------------------


def turns_of(probes: list[float], seconds: float = 1.0):
    """One variant whose probe takes these times, round by round, and a clock that its turns move on."""
    times, now = iter(probes), [0.0]

    def turn() -> Turn:
        now[0] += seconds
        probe = next(times)
        return Turn(forward=probe, both=2 * probe, probes=(probe, probe))

    return {"fusible": turn}, lambda: now[0]


@pytest.mark.quick
def test_a_probe_judges_by_its_own_best_time():
    probe = Probe(busy=1.5)
    probe.see([2.0, 1.0])
    assert probe.best == 1.0
    assert probe.quiet([1.0, 1.5])
    assert not probe.quiet([1.0, 1.6])
    probe.see([0.5])
    assert not probe.quiet([1.0])


@pytest.mark.quick
def test_busy_rounds_are_played_again_and_counted():
    turns, clock = turns_of([1.0, 4.0, 1.1, 9.0, 1.2], seconds=0.01)
    played = play(turns, Probe(), 3, clock)
    assert [one.turns["fusible"].forward for one in played.rounds] == [1.0, 1.1, 1.2]
    assert (played.rejected, played.noisy) == (2, False)


@pytest.mark.quick
def test_a_better_probe_judges_earlier_rounds_anew():
    turns, clock = turns_of([3.0, 3.0, 1.0, 1.0, 1.0], seconds=0.01)
    played = play(turns, Probe(), 3, clock)
    assert (len(played.rounds), played.rejected, played.noisy) == (3, 2, False)


@pytest.mark.quick
def test_a_machine_that_stays_busy_ends_the_row_as_noisy():
    probe = Probe()
    probe.see([1.0])  # in an earlier row
    turns, clock = turns_of([5.0] * 99, seconds=0.01)
    played = play(turns, probe, 4, clock)
    assert (len(played.rounds), played.rejected, played.noisy) == (12, 12, True)


@pytest.mark.quick
def test_slow_rows_get_fewer_rounds():
    turns, clock = turns_of([1.0] * 99, seconds=4.0)
    assert len(play(turns, Probe(), 10, clock).rounds) == measure.ENOUGH
    probe = Probe()
    probe.see([0.1])
    turns, clock = turns_of([1.0] * 99, seconds=10.0)
    assert play(turns, probe, 10, clock).rejected == 2 * measure.ENOUGH


@pytest.mark.quick
def test_variants_take_turns_in_both_orders():
    asked = []
    turns = {name: lambda name=name: asked.append(name) or Turn(1.0, 1.0, (1.0, 1.0)) for name in "abc"}
    play(turns, Probe(), 2)
    assert "".join(asked) == "abccba"


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_spread_is_median_and_quartiles():
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0)
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)


@pytest.mark.quick
def test_targets_that_are_missed_are_named_with_their_figures():
    targets = Targets(2, 2, 1, 0.5, kept=2)
    assert result(1.0, targets, 50, eager=2.0, tuned=2.5, compile=1.0, floor=0.6).misses() == {}
    assert result(1.0, targets, 51, eager=1.5, tuned=0.9, compile=0.8, floor=0.4).misses() == {
        "eager": "eager 1.50x, target 2x",
        "tuned": "tuned 0.90x, target 2x",
        "compile": "compile 0.80x, target 1x",
        "floor": "40% of the floor, target 50%",
        "kept": "keeps 51 bytes, target 1/2 of eager's 100",
    }
    slow = RowResult(tiny("mlp"), timings={"fusible": Timing(first=50.0, second=10.0)})
    assert slow.misses() == {"first": "first call 40 ms over the second, target 20 ms"}
    assert result(1.0, targets).misses() == {}  # what was not measured is not missed


@pytest.mark.quick
def test_json_comes_back_the_same():
    noisy = dataclasses.replace(result(1.0, Targets(2), 7, eager=1.5, floor=0.5), status="noisy", zeros=(1.0, 2.0))
    report = Report(MACHINE, (noisy, RowResult(tiny("swiglu"), "failed", "wrong")), 2.5)
    text = json.dumps(report.to_dict())
    assert Report.from_dict(json.loads(text)) == report
    assert json.loads(text)["rows"][0]["ratios"] == {"eager": 1.5, "tuned": None, "compile": None, "floor": 0.5}


# -- the whole of it, on tiny rows -------------------------------------------------------------------------------------


def test_a_run_shows_saves_and_draws(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(rows, "ROWS", (tiny("swiglu", targets=Targets(eager=1e9)),))
    monkeypatch.setattr(measure, "SECONDS", 0.2)
    saved, drawn = tmp_path / "bench.json", tmp_path / "bench.svg"
    arguments = ["bench", "--rounds", "2", "--threads", "1", "--no-compile", "--json", str(saved), "--plot", str(drawn)]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    assert "swiglu-4x16" in shown
    assert re.search(r"^swiglu-4x16: missed: eager [\d.]+x, target 1e\+09x$", shown, re.MULTILINE)
    assert re.search(r"^1 row in \d+ s, 1 with a missed target, 0 failed\.$", shown, re.MULTILINE)
    report = Report.from_dict(json.loads(saved.read_text()))
    (first,) = report.rows
    assert list(first.timings) == ["fusible", "eager", "tuned", "compile"]
    assert first.timings["compile"].reason == "not asked for"
    assert report.machine.threads == 1
    for variant in ("fusible", "eager"):
        timing = first.timings[variant]
        assert 0 < timing.forward.median < timing.both.median
        assert timing.both.low <= timing.both.median <= timing.both.high
        assert timing.first > 0 < timing.second
        assert timing.kept is not None
    assert first.floor is not None
    assert first.zeros is not None
    assert drawn.read_text().lstrip().startswith("<?xml")


def test_a_peer_that_cannot_run_is_n_a_with_its_reason_and_a_wrong_row_fails(monkeypatch):
    asked = []

    class Fake:
        def __init__(self, row, variant, threads, environment):
            self.variant = variant
            asked.append((variant, environment))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def answer(self):
            if self.variant == "compile":
                raise measure.Failure("InductorError: No working C++ compiler found")

        def ask(self, question):
            answers = {"first": (2.0, 1.0), "check": None, "kept": 8, "floor_turn": None}
            return answers.get(question, Turn(1.0, 2.0, (1.0, 1.0)))

    monkeypatch.setattr(measure, "Worker", Fake)
    found = measure.measure(tiny("mlp"), Plan(2, compile_cache="there"), Probe())
    assert found.status == "ok"
    assert found.timings["compile"].reason == "InductorError: No working C++ compiler found"
    assert found.timings["tuned"].both is not None or "glibc" in found.timings["tuned"].reason
    assert found.timings["fusible"] == Timing(Spread(1e3, 1e3, 1e3), Spread(2e3, 2e3, 2e3), 2e3, 1e3, 8)
    assert dict(asked)["compile"] == {"TORCHINDUCTOR_CACHE_DIR": "there"}
    assert dict(asked)["eager"] == {}
    monkeypatch.setattr(Fake, "ask", lambda self, question: "output 0 is off" if question == "check" else (2.0, 1.0))
    found = measure.measure(tiny("mlp"), Plan(2), Probe())
    assert (found.status, found.reason) == ("failed", "output 0 is off")


@pytest.mark.quick
def test_exit_code_says_what_failed(monkeypatch, capsys):
    monkeypatch.setattr(rows, "ROWS", (tiny("mlp"),))
    answers = {"good": result(1.0, Targets(1), eager=2.0), "missed": result(1.0, Targets(3), eager=2.0)}
    answers["failed"] = RowResult(tiny("mlp"), "failed", "output 0 is off")
    codes = {}
    for name, answer in answers.items():
        monkeypatch.setattr("fusible.bench.main.measure", lambda *arguments, answer=answer: answer)
        codes[name] = (cli.run(["bench"]), cli.run(["bench", "--check"]))
    assert codes == {"good": (0, 0), "missed": (0, 1), "failed": (1, 1)}
    assert "mlp-4x16: FAILED: output 0 is off" in capsys.readouterr().out


@pytest.mark.quick
def test_ctrl_c_shows_what_was_measured(monkeypatch, capsys):
    monkeypatch.setattr(rows, "ROWS", (tiny("mlp"), tiny("rmsnorm")))

    def measure_one(row, *others):
        if row.kind == "rmsnorm":
            raise KeyboardInterrupt
        return result(1.0, eager=2.0)

    monkeypatch.setattr("fusible.bench.main.measure", measure_one)
    assert cli.run(["bench"]) == 130
    assert "Stopped after 1 of 2 rows." in capsys.readouterr().out


@pytest.mark.quick
def test_words_select_kinds_groups_and_patterns():
    def names(*words: str) -> list[str]:
        return [row.name for row in rows.select(words, ROWS)]

    assert len(names()) == len(ROWS)
    assert names("rmsnorm") == ["rmsnorm-4096x2048", "rmsnorm-512x1024", "rmsnorm-64x256"]
    assert names("half", "*-64x256") == [
        "rmsnorm-64x256",
        "swiglu-64x256",
        "mlp-512x512-float16",
        "mlp-512x512-bfloat16",
    ]
    with pytest.raises(InputError, match="did you mean 'rmsnorm'"):
        names("rmsnrm")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rmsnrm"], "ROWS: no row, kind or group is called 'rmsnrm'; did you mean 'rmsnorm'?"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
        (["--plot", "bench.bmp"], "--plot bench.bmp: the name must end in one of .png, .svg, .pdf"),
        (["--json", "no/such/bench.json"], "--json no/such/bench.json: there is no folder no/such"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    assert cli.run(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"fusible: {message}\n")


@pytest.mark.quick
def test_an_unknown_word_without_a_close_one_lists_what_there_is():
    with pytest.raises(InputError, match=r"there are rmsnorm, add-rmsnorm, .*, large, small, mlps, half"):
        rows.select(["zzzzz"], ROWS)


@pytest.mark.quick
def test_options_take_a_folder_for_no_file(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        Options(json=tmp_path)


@pytest.mark.quick
def test_a_missing_matplotlib_is_named_before_anything_runs(monkeypatch, capsys, tmp_path):
    for name in [name for name in sys.modules if name == "fusible.bench.chart" or name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("fusible.bench.main.measure", lambda *arguments: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["fusible", "bench", "--plot", str(tmp_path / "bench.png")])
    assert main() == 2
    line = "fusible: the commands need matplotlib; install it with: pip install 'fusible[cli]'\n"
    assert capsys.readouterr().err == line
