"""What the demo shows in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fusible.demo.config import BATCH, CONTEXT, Config
from fusible.demo.result import AGREE, Result, Run
from fusible.demo.worker import WARM_UP

__all__ = ["Bars", "show_agreement", "show_plan", "show_sample", "show_start", "show_table"]


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


def show_start(console: Console, config: Config, text: str, vocabulary: int, parameters: int) -> None:
    console.print(
        f"A GPT of {parameters:,} parameters ({config.layers} layers of width {config.width}, {config.heads} heads) "
        f"learns English text, character by character: {len(text):,} characters, {vocabulary} different ones. "
        f"Both variants start from the same weights (seed {config.seed}) and see the same {config.steps} batches "
        f"of {BATCH} × {CONTEXT} characters.\n"
    )


def show_agreement(console: Console, result: Result) -> None:
    largest, step = result.largest_difference()
    first, last = result.losses()[1][0], result.losses()[1][-1]
    what = f"by {largest:.1e} nats at most (step {step}), while the loss went from {first:.3f} to {last:.3f}"
    if result.agrees():
        console.print(f"\n[green]The two loss curves agree:[/] they differ {what}.\n")
    else:
        console.print(f"\n[red]The two loss curves do not agree:[/] they differ {what}; up to {AGREE} is rounding.\n")


def show_table(console: Console, result: Result) -> None:
    plain, fused = result.runs
    table = Table("", *(run.variant for run in result.runs), "fusible / torch.nn")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("seconds", "{:.1f}", [run.seconds for run in result.runs]),
        ("ms per step (median)", "{:.1f}", [run.milliseconds for run in result.runs]),
        ("tokens/s", "{:,.0f}", [run.tokens_per_second for run in result.runs]),
        ("peak memory (MiB)", "{:,.0f}", [None if run.peak is None else run.peak / 2**20 for run in result.runs]),
        ("last loss (nats)", "{:.4f}", [run.steps[-1].loss for run in result.runs]),
    )
    for name, form, values in rows:
        known = [value for value in values if value is not None]
        ratio = f"{known[1] / known[0]:.2f}" if len(known) == 2 and known[0] else "n/a"
        table.add_row(name, *("n/a" if value is None else form.format(value) for value in values), ratio)
    console.print(table)
    console.print(
        f"Each variant has a process of its own, and they take turns. Seconds are whole training steps (batch, forward, "
        f"backward, AdamW) after {WARM_UP} steps of warm-up; peak memory is how much the process grew over what "
        f"Python and torch need: weights, gradients, optimizer, activations.\n",
        style="dim",
    )


def show_plan(console: Console, plan: str) -> None:
    console.print("How one of the blocks runs, as [bold]print(block.explain(x))[/] shows it:\n")
    console.print(Text(plan))


def show_sample(console: Console, sample: str) -> None:
    console.print()
    console.print(Panel(Text(sample), title="what the fusible model writes now", title_align="left"))
