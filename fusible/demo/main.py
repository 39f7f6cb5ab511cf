"""The demo from its options to its last line."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

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
    report.show_start(console, config, text, len(vocabulary), sum(p.numel() for p in model.parameters()))
    result = Result(*(Run(variant, config.tokens_per_step) for variant in ("torch.nn", "fusible")))
    stopped = train(result, config, text, out / "model.pt", console)
    if not result.common:
        console.print("Stopped before both variants had made a step; nothing was saved.")
        return INTERRUPTED
    result.write_losses(out / "losses.csv")
    draw(result, out / "demo.png")
    report.show_agreement(console, result)
    report.show_table(console, result)
    if stopped:
        console.print(f"Stopped after {result.common} of {config.steps} steps; what was trained so far is in {out}.")
        return INTERRUPTED
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True))
    report.show_plan(console, explain_block(model, config))
    report.show_sample(console, write(model, vocabulary, config))
    console.print(f"\nLoss curves: {out / 'demo.png'} and {out / 'losses.csv'}; weights: {out / 'model.pt'}")
    return 0 if result.agrees() else 1


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}") from None


def train(result: Result, config: Config, text: str, weights: Path, console: Console) -> bool:
    """Fills `result` and saves fusible's weights; returns whether Ctrl-C ended it early."""
    with ExitStack() as stack:
        try:
            with console.status("Starting two processes and warming up ..."):
                workers = [stack.enter_context(Worker(run.variant, config, text)) for run in result.runs]
                for worker in workers:
                    worker.wait()
            with report.Bars(console, result.runs, config.steps) as bars:
                take_turns(workers, result.runs, config.steps, bars)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
        if result.common:
            for worker, run in zip(workers, result.runs, strict=True):
                run.peak = worker.finish(weights if run is result.fused else None).peak
    return stopped


def take_turns(workers: list[Worker], runs: tuple[Run, Run], steps: int, bars: report.Bars) -> None:
    for start in range(0, steps, TURN):
        for worker, run in zip(workers, runs, strict=True):
            for _ in range(start, min(start + TURN, steps)):
                run.steps.append(worker.step())
                bars.update(run)


def explain_block(model: torch.nn.Module, config: Config) -> str:
    x = torch.zeros(BATCH, CONTEXT, config.width, requires_grad=True)
    block = model.body[0]
    assert isinstance(block, fusible.Sequential)
    return str(block.explain(x))


def write(model: torch.nn.Module, vocabulary: Vocabulary, config: Config) -> str:
    generator = torch.Generator().manual_seed(config.seed)
    prompt = vocabulary.encode("The") if set("The") <= set(vocabulary.characters) else torch.zeros(1, dtype=torch.long)
    return vocabulary.decode(generate(model.eval(), prompt, SAMPLE, generator))
