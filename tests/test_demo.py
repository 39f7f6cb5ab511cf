"""The demo: run as a user runs it, with tiny sizes, and its parts that a run does not show."""

from __future__ import annotations

import csv
import io
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fusible.demo import main, report
from fusible.demo.config import CONTEXT, Config, read_text
from fusible.demo.model import MODELS, fusible_model, generate, plain_model
from fusible.demo.result import AGREE, Result, Run
from fusible.demo.train import Trainer, Vocabulary, make_model, schedule
from fusible.demo.worker import PeakMemory, Step, Worker, WorkerError

STEPS = 20
TINY = Config(steps=STEPS, width=32, layers=1)
COMMAND = [sys.executable, "-m", "fusible", "demo", "--width", "32", "--layers", "1"]
#: Tiny steps gain nothing from a second thread, and lose much where tests run in parallel.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
FILES = ["demo.png", "losses.csv", "model.pt"]


def losses(folder: Path) -> list[tuple[int, float, float]]:
    with (folder / "losses.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "torch.nn", "fusible"]
    return [(int(step), float(plain), float(fused)) for step, plain, fused in rows]


def is_picture(path: Path) -> bool:
    data = path.read_bytes()
    size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    return data.startswith(b"\x89PNG") and size == (1200, 810) and len(data) > 20_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    command = [*COMMAND, "--steps", str(STEPS), "--out", str(folder)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False), folder


def test_a_run_shows_the_comparison(finished):
    process, folder = finished
    assert (process.returncode, process.stderr) == (0, "")
    out = re.sub(r"\s+", " ", process.stdout)
    for variant in ("torch.nn", "fusible"):
        assert re.search(rf"{variant} \S+ {STEPS}/{STEPS} loss \d\.\d{{3}} +\d+ tokens/s", out)
    for row in ("seconds", "ms per step, median", "tokens/s", "peak memory, MiB"):
        assert re.search(rf" {row} ([\d.,]+) ([\d.,]+) (\d+\.\d\d) ", out), row
    assert re.search(r"The two loss curves agree\. They differ by \d\.\de-\d\d nats per character at most", out)
    assert all(str(folder / name) in process.stdout for name in FILES)


def test_a_run_shows_the_plan_of_a_block_and_a_sample(finished):
    process, _ = finished
    assert "print(block.explain(x))" in process.stdout
    assert f"on x [16, {CONTEXT}, 32] float32 on cpu" in process.stdout
    assert "linear_bias" in process.stdout
    assert "Attention" in process.stdout
    sample = process.stdout.partition("what the fusible model writes now")[2]
    assert "│ The" in sample


def test_a_run_leaves_losses_weights_and_picture(finished):
    _, folder = finished
    assert sorted(os.listdir(folder)) == FILES
    rows = losses(folder)
    assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
    for _, plain, fused in rows:
        assert math.isclose(plain, fused, abs_tol=1e-4)
    assert rows[-1][2] < rows[0][2] - 0.5
    assert is_picture(folder / "demo.png")


def test_saved_weights_are_trained_and_load_into_either_variant(finished):
    _, folder = finished
    text = read_text(None)
    vocabulary = Vocabulary(text)
    state = torch.load(folder / "model.pt", weights_only=True)
    for variant, make in MODELS.items():
        model = make(len(vocabulary), TINY)
        model.load_state_dict(state)
        loss = Trainer(model, vocabulary.encode(text), TINY).step()
        assert abs(loss - losses(folder)[-1][2]) < 0.3, variant


class Terminal:
    """A command in a terminal of its own, where Ctrl-C reaches every process of it."""

    def __init__(self, command: list[str]) -> None:
        ours, theirs = os.openpty()
        # A shell that runs the tests in the background has it ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.screen = ""
        self.ours = ours
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=ENVIRONMENT,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def read(self) -> bool:
        """Reads on; returns whether there may be more."""
        try:
            piece = os.read(self.ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.screen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", piece.decode(errors="replace"))
        return bool(piece)

    def read_until(self, pattern: str) -> None:
        end = time.monotonic() + 200
        while not re.search(pattern, self.screen):
            assert self.read(), f"ended without {pattern}: {self.screen}"
            assert time.monotonic() < end, f"no {pattern} in time: {self.screen}"

    def ctrl_c(self) -> tuple[int, str]:
        """Exit code and what the screen showed from here on."""
        start = len(self.screen)
        os.killpg(self.process.pid, signal.SIGINT)
        while self.read():
            pass
        return self.process.wait(timeout=60), re.sub(r"\s+", " ", self.screen[start:])


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_saves_what_was_trained(tmp_path):
    with Terminal([*COMMAND, "--steps", "90000", "--out", str(tmp_path)]) as terminal:
        terminal.read_until(r"fusible +\S+ +[1-9]\d*/90000 ")
        code, rest = terminal.ctrl_c()
    assert code == 130
    assert "Traceback" not in terminal.screen
    told = re.search(r"Stopped after (\d+) of 90000 steps; what was trained so far is saved\.", rest)
    rows = losses(tmp_path)
    assert len(rows) == int(told[1]) >= 1
    assert "The two loss curves agree" in rest
    assert sorted(os.listdir(tmp_path)) == FILES
    assert is_picture(tmp_path / "demo.png")
    vocabulary = len(Vocabulary(read_text(None)))
    fusible_model(vocabulary, TINY).load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_before_the_first_step_saves_nothing(tmp_path):
    with Terminal([*COMMAND, "--steps", "90000", "--out", str(tmp_path)]) as terminal:
        terminal.read_until("Starting")
        code, rest = terminal.ctrl_c()
    assert code == 130
    assert "Traceback" not in terminal.screen
    assert "nothing was saved" in rest
    assert os.listdir(tmp_path) == []


def test_another_text_and_curves_that_part(tmp_path, monkeypatch):
    """Runs in this process, with a difference of 1 planted into one variant's losses."""
    path = tmp_path / "text.txt"
    path.write_text("Nicht so schnell, sagte der Bär. " * 40, encoding="utf-8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    step = Worker.step
    monkeypatch.setattr(Worker, "step", lambda w: Step(step(w).loss + (w.variant == "fusible"), 0.5))
    console = Console(file=io.StringIO(), width=100)
    code = main.run_demo(Config(steps=2, width=8, layers=1, heads=2), tmp_path / "out", path, console)
    shown = re.sub(r"\s+", " ", console.file.getvalue())
    assert code == 1
    assert "1,320 characters, 19 different ones" in shown
    assert "The two loss curves do not agree. They differ by 1.0e+00 nats" in shown
    assert "│ \x00" not in shown
    assert len(losses(tmp_path / "out")) == 2


def test_a_training_that_fails_or_dies_is_one_line():
    with Worker("torch.nn") as worker, pytest.raises(WorkerError) as failed:
        worker.prepare(TINY, "too short")
    assert str(failed.value).startswith("torch.nn: RuntimeError: ")
    with Worker("fusible") as worker:
        worker.process.kill()
        with pytest.raises(WorkerError, match="fusible: the training process ended by itself, with exit code -9"):
            worker.prepare(TINY, "abc " * 100)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_never_reaches_a_training_process():
    """In a new process: what multiprocessing starts along with a first worker must not lift the protection."""
    code = """
        import os, signal
        from fusible.demo.config import Config
        from fusible.demo.worker import Worker
        with Worker("torch.nn") as worker:
            os.kill(worker.process.pid, signal.SIGINT)
            worker.prepare(Config(steps=1, width=8, layers=1, heads=1), "abc " * 100)
            os.kill(worker.process.pid, signal.SIGINT)
            print("loss", worker.step().loss)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert process.stderr == ""
    assert re.fullmatch(r"loss \d\.\d+\n", process.stdout)


@pytest.mark.quick
def test_both_variants_have_the_same_keys_weights_and_losses():
    tokens = torch.arange(1000) % 7
    models = [make_model(variant, 7, TINY) for variant in MODELS]
    states = [model.state_dict() for model in models]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    first, second = ([Trainer(model, tokens, TINY).step() for _ in range(2)] for model in models)
    assert first == pytest.approx(second, abs=1e-4)


@pytest.mark.quick
def test_the_seed_decides_weights_and_batches():
    def first_batch(seed: int) -> torch.Tensor:
        config = Config(width=8, heads=1, seed=seed)
        return Trainer(plain_model(7, config), torch.arange(1000), config).batch()[0]

    def weight(seed: int) -> torch.Tensor:
        return make_model("fusible", 7, Config(width=8, heads=1, seed=seed))[0].weight

    for made in (first_batch, weight):
        assert torch.equal(made(1), made(1))
        assert not torch.equal(made(1), made(2))


@pytest.mark.quick
def test_a_batch_is_text_and_the_text_that_follows():
    x, target = Trainer(plain_model(7, TINY), torch.arange(CONTEXT + 1), TINY).batch()
    assert x.tolist() == [list(range(CONTEXT))] * 16
    assert torch.equal(target, x + 1)


@pytest.mark.quick
def test_the_model_looks_at_earlier_characters_only():
    model = make_model("fusible", 7, TINY)
    tokens = torch.arange(CONTEXT)[None] % 7
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 7
    same = (model[:-1](tokens) - model[:-1](changed)).abs().amax(-1)[0] < 1e-6
    assert same[:40].all()
    assert not same[40:].any()


@pytest.mark.quick
def test_generation_continues_beyond_the_context():
    model = make_model("fusible", 7, TINY)
    start = torch.tensor([1, 2, 3])
    drawn = [generate(model, start, CONTEXT + 5, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert drawn[0][:3].tolist() == [1, 2, 3]
    assert len(drawn[0]) == CONTEXT + 8
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.quick
@pytest.mark.parametrize("steps", [1, 2, 20, 600])
def test_the_learning_rate_rises_then_falls(steps):
    rates = [schedule(done, steps) for done in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) == 1
    if steps == 600:
        assert rates[0] < 0.05
        assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def result(plain: list[float], fused: list[float]) -> Result:
    return Result(
        *(Run(name, 10, [Step(x, 0.5) for x in xs]) for name, xs in (("torch.nn", plain), ("fusible", fused)))
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("plain", "fused", "largest", "step", "agrees"),
    [
        ([3.0, 2.0, 1.0], [3.0, 2.25, 1.0], 0.25, 2, False),
        ([3.0, 2.0], [3.0, 2.0, 9.0], 0.0, 1, True),
        ([3.0, 2.0], [3.0, 2.0 + 0.9 * AGREE], 0.9 * AGREE, 2, True),
        ([3.0, 2.0, 1.0], [3.0, math.nan, 9.0], math.nan, 2, False),
    ],
)
def test_the_largest_difference_of_the_common_steps(plain, fused, largest, step, agrees):
    made = result(plain, fused)
    assert made.largest_difference() == (pytest.approx(largest, nan_ok=True), step)
    assert made.agrees() is agrees


@pytest.mark.quick
def test_a_peak_that_nobody_knows_is_not_made_up():
    made = result([1.0, 1.0], [1.0, 1.0])
    made.fused.steps = [Step(1.0, 0.25)] * 2
    made.plain.peak = 2**20
    console = Console(file=io.StringIO(), width=100)
    report.show_table(console, made)
    rows = {
        line.split("  ")[1].strip(): line.split()[-3:] for line in console.file.getvalue().splitlines() if "  " in line
    }
    assert rows["peak memory, MiB"] == ["1.0", "n/a", "n/a"]
    assert rows["tokens/s"] == ["20", "40", "2.00"]
    assert rows["seconds"] == ["1.0", "0.5", "0.50"]


@pytest.mark.quick
def test_peak_memory_is_what_was_added_at_the_highest():
    def take(size: int) -> None:
        # Not by malloc, which may still hold pages that an earlier test had touched: then nothing would be added.
        with mmap.mmap(-1, size) as pages:
            for start in range(0, size, mmap.PAGESIZE):
                pages[start] = 1

    take(64 << 20)  # a peak of before, which must not count
    memory = PeakMemory()
    if memory.start is None:
        pytest.skip("this system does not tell a process's peak memory")
    take(48 << 20)
    assert 47 << 20 < memory.peak() < 60 << 20
