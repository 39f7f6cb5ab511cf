"""What the demo shows in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fusible.demo.config import BATCH, CONTEXT, Config
from fusible.demo.result import AGREE, Result, Run
from fusible.demo.worker import WARM_UP

__all__ = ["Bars", "show_agreement", "show_files", "show_plan", "show_sample", "show_start", "show_table"]


class Bars:
    """One progress bar per variant, with its last loss and its tokens per second."""

    def __init__(self, console: Console, runs: tuple[Run, Run], steps: int) -> None:
        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("[bold]{task.fields[speed]}[/] tokens/s"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, refresh_per_second=4)
        self.tasks: dict[str, TaskID] = {
            run.variant: self.progress.add_task(run.variant, total=steps, loss="    –", speed="     –") for run in runs
        }

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, run: Run) -> None:
        loss, speed = f"{run.steps[-1].loss:.3f}", f"{run.tokens_per_second:6.0f}"
        self.progress.update(self.tasks[run.variant], completed=len(run.steps), loss=loss, speed=speed)


def show_plan(console: Console, plan: str) -> None:
    console.print("How one of the model's blocks runs, as [bold]print(block.explain(x))[/] shows it:\n")
    console.print(Text(plan.rstrip()), soft_wrap=True)


def show_start(console: Console, config: Config, text: str, vocabulary: int, parameters: int) -> None:
    layers = f"{config.layers} {'layer' if config.layers == 1 else 'layers'} of width {config.width}"
    console.print(
        f"\nA GPT of {parameters:,} parameters ({layers}) learns English text, character by character: "
        f"{len(text):,} characters, {vocabulary} different ones. It is trained twice, with plain torch.nn and with "
        f"fusible, from the same weights (seed {config.seed}), on the same {config.steps} batches of "
        f"{BATCH} × {CONTEXT} characters.\n",
        highlight=False,
    )


def show_sample(console: Console, sample: str) -> None:
    console.print()
    console.print(Panel(Text(sample), title="what the fusible model writes now", title_align="left"))


def show_table(console: Console, result: Result) -> None:
    plain, fused = result.runs
    table = Table("", plain.variant, fused.variant, "fusible / torch.nn", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("seconds", "{:.1f}", plain.seconds, fused.seconds),
        ("ms per step, median", "{:.1f}", plain.milliseconds, fused.milliseconds),
        ("tokens/s", "{:,.0f}", plain.tokens_per_second, fused.tokens_per_second),
        ("peak memory, MiB", "{:,.1f}", plain.peak_mib, fused.peak_mib),
    )
    for name, form, *values in rows:
        known = [value for value in values if value is not None]
        ratio = f"{known[1] / known[0]:.2f}" if len(known) == 2 and known[0] else "n/a"
        table.add_row(name, *("n/a" if value is None else form.format(value) for value in values), ratio)
    console.print(table)
    console.print(
        f"Each variant trains in a process of its own; the two take turns, so that a busy machine slows both alike. "
        f"Seconds: whole training steps (batch, forward, backward, AdamW), after {WARM_UP} steps of warm-up. "
        f"Peak memory: resident memory at its highest, less that of Python and torch before the model was made.\n",
        style="dim",
    )


def show_agreement(console: Console, result: Result) -> None:
    largest, step = result.largest_difference()
    first, last = result.losses()[1][0], result.losses()[1][-1]
    what = f"by {largest:.1e} nats per character at most (step {step}); the loss went from {first:.3f} to {last:.3f}"
    if result.agrees():
        console.print(f"[bold green]The two loss curves agree.[/] They differ {what}.\n", highlight=False)
    else:
        console.print(
            f"[bold red]The two loss curves do not agree.[/] They differ {what}. Rounding explains {AGREE} at most.\n",
            highlight=False,
        )


def show_files(console: Console, out: Path) -> None:
    names = ", ".join(str(out / name) for name in ("demo.png", "losses.csv", "model.pt"))
    console.print(Text(f"Loss curves and weights: {names}"), soft_wrap=True)
