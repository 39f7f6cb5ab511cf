"""The demo from its options to its last line."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import torch
from rich.console import Console

import fusible
from fusible.demo import report
from fusible.demo.config import BATCH, CONTEXT, Config, InputError, read_text
from fusible.demo.model import generate
from fusible.demo.picture import draw
from fusible.demo.result import Result, Run
from fusible.demo.train import Vocabulary, make_model
from fusible.demo.worker import Worker

__all__ = ["INTERRUPTED", "run_demo"]

#: Steps that one variant does before it is the other's turn.
TURN = 5
SAMPLE = 400
INTERRUPTED = 130


def run_demo(config: Config, out: Path, text_file: Path | None, console: Console) -> int:
    """Trains both variants, shows and saves the comparison; returns the exit code.

    0: the curves agree. 1: they do not. 130: stopped by Ctrl-C; what was trained until then is saved and shown.
    Raises `InputError` on a text or folder that cannot be used, `WorkerError` if a training fails.
    """
    text = read_text(text_file)
    make_folder(out)
    vocabulary = Vocabulary(text)
    model = make_model("fusible", len(vocabulary), config)
    report.show_plan(console, explain_block(model, config))
    report.show_start(console, config, text, len(vocabulary), sum(p.numel() for p in model.parameters()))
    result = Result(*(Run(variant, config.tokens_per_step) for variant in ("torch.nn", "fusible")))
    stopped = train(result, config, text, out / "model.pt", console)
    if not result.common:
        console.print("Stopped before both variants had made a step; nothing was saved.")
        return INTERRUPTED
    result.write_losses(out / "losses.csv")
    draw(result, out / "demo.png")
    if not stopped:
        model.load_state_dict(torch.load(out / "model.pt", weights_only=True))
        report.show_sample(console, write(model, vocabulary, config))
    report.show_table(console, result)
    report.show_agreement(console, result)
    if stopped:
        console.print(f"Stopped after {result.common} of {config.steps} steps; what was trained so far is saved.")
    report.show_files(console, out)
    return INTERRUPTED if stopped else 0 if result.agrees() else 1


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # a folder that cannot be written to is found now, not after training
            pass
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}") from None


def train(result: Result, config: Config, text: str, weights: Path, console: Console) -> bool:
    """Fills `result` and saves fusible's weights; returns whether Ctrl-C ended it early."""
    with ExitStack() as stack:
        try:
            with console.status("Starting two processes and warming up ..."):
                workers = [stack.enter_context(Worker(run.variant)) for run in result.runs]
                for worker in workers:
                    worker.prepare(config, text)
        except KeyboardInterrupt:
            return True
        with ctrl_c_asks_to_stop() as asked, report.Bars(console, result.runs, config.steps) as bars:
            take_turns(workers, result.runs, config.steps, bars, asked)
        if result.common:
            for worker, run in zip(workers, result.runs, strict=True):
                run.peak = worker.finish(weights if run is result.fused else None).peak
    return asked.is_set()


def take_turns(workers: list[Worker], runs: tuple[Run, Run], steps: int, bars: report.Bars, stop: Event) -> None:
    for start in range(0, steps, TURN):
        for worker, run in zip(workers, runs, strict=True):
            for _ in range(start, min(start + TURN, steps)):
                if stop.is_set():
                    return
                run.steps.append(worker.step())
                bars.update(run)


@contextmanager
def ctrl_c_asks_to_stop() -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that a step is never torn; a second one interrupts at once, as usual."""
    asked = Event()
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def explain_block(model: fusible.Sequential, config: Config) -> str:
    """One layer of the model, the two branches behind the embeddings, explained as a block."""
    x = torch.zeros(BATCH, CONTEXT, config.width, requires_grad=True)
    return str(model[2:4].explain(x))


def write(model: fusible.Sequential, vocabulary: Vocabulary, config: Config) -> str:
    generator = torch.Generator().manual_seed(config.seed)
    prompt = vocabulary.encode("The") if set("The") <= set(vocabulary.characters) else torch.zeros(1, dtype=torch.long)
    return vocabulary.decode(generate(model, prompt, SAMPLE, generator))
