"""What the benchmark shows in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fusible.bench.results import Machine, Report, RowResult, Spread, Timing
from fusible.bench.rows import PEERS, VARIANTS

__all__ = ["Bar", "show"]

LOSS = "bold red"
MISS = "yellow"
NOTHING = "–"
MIB = 1 << 20
WIDEST = 240


class Bar:
    """The progress bar: rows done, and what is being done with the one at hand."""

    def __init__(self, console: Console, rows: int) -> None:
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("[dim]{task.fields[stage]}[/]"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, refresh_per_second=2, transient=True)
        self.task = self.progress.add_task("", total=rows, stage="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def stage(self, row: str) -> Callable[[str], None]:
        """Where `measure` says what it is doing with this row."""
        return lambda what: self.progress.update(self.task, description=row, stage=what)

    def done(self) -> None:
        self.progress.advance(self.task)


def show(console: Console, report: Report) -> None:
    """The tables of a run, and in words what failed, was noisy, or missed its target."""
    rows = [result for result in report.rows if result.status != "failed"]
    console.print(Text(f"\n{describe(report.machine)}"), soft_wrap=True)
    if rows:
        _print(console, times(rows, "both", "forward + backward"))
        _print(console, times(rows, "forward", "forward, gradients wanted"))
        _print(console, others(rows))
        console.print(
            f"Medians in ms, with quartiles for fusible; 1.5x: the peer's time is 1.5 times ours. tuned: eager with a "
            f"malloc that keeps its memory. [{MISS}]Misses its target[/], [{LOSS}]slower than the peer[/]. First call: "
            f"forward + backward in a fresh process, and the second. Kept: for backward, beside parameters and inputs.",
            style="dim",
        )
    for result in report.rows:
        for text in remarks(result):
            console.print(Text(f"{result.row.name}: {text}"), soft_wrap=True)
    missed, failed = len(report.missed), len(report.failed)
    count = f"{len(report.rows)} row{'' if len(report.rows) == 1 else 's'}"
    console.print(f"{count} in {report.seconds:.0f} s, {missed} with a missed target, {failed} failed.")


def _print(console: Console, table: Table) -> None:
    """Never narrower than the table needs: a file or a narrow terminal gets whole lines."""
    before = console.width
    console.width = max(before, WIDEST)
    console.print(table, crop=False)
    console.width = before


def describe(machine: Machine) -> str:
    load = "" if machine.load is None else f", load {machine.load:.1f} before"
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    return (
        f"fusible {machine.fusible} ({machine.kernels}), torch {machine.torch}, Python {machine.python}, "
        f"{machine.platform}, {machine.cpu}, {threads}{load}"
    )


def times(rows: Sequence[RowResult], what: str, title: str) -> Table:
    """Times of each variant and ratios; targets hold for forward and backward together."""
    table = _table(title, "row", "fusible", *PEERS, "floor")
    for result in rows:
        misses = result.misses() if what == "both" else {}
        ours = result.timings.get("fusible", Timing())
        cells = [_peer(result, peer, what, peer in misses) for peer in PEERS]
        found = ours.both if what == "both" else ours.forward
        name = Text(result.row.name + (" (noisy)" if result.status == "noisy" else ""))
        table.add_row(name, _spread(found), *cells, _floor(result, what, "floor" in misses))
    return table


def others(rows: Sequence[RowResult]) -> Table:
    """First calls, kept bytes, rounds."""
    headers = [f"first {variant}" for variant in VARIANTS if variant != "tuned"]
    table = _table("first call, memory, rounds", "row", *headers, "kept fusible", "eager", "compile", "rounds")
    for result in rows:
        misses = result.misses()
        firsts = [_first(result.timings.get(variant)) for variant in VARIANTS if variant != "tuned"]
        kept = [_bytes(result.kept(variant)) for variant in ("fusible", "eager", "compile")]
        if "first" in misses:
            firsts[0].stylize(MISS)
        if "kept" in misses:
            kept[0].stylize(MISS)
        rejected = f" ({result.rejected} rejected)" if result.rejected else ""
        table.add_row(Text(result.row.name), *firsts, *kept, f"{result.rounds}{rejected}")
    return table


def remarks(result: RowResult) -> list[str]:
    """In words: a failure, noise, missed targets, peers that did not run, arithmetic that is slow on some data."""
    if result.status == "failed":
        return [f"FAILED: {result.reason}"]
    found = [f"noisy: {result.reason}"] if result.status == "noisy" else []
    found += [f"missed: {text}" for text in result.misses().values()]
    found += [
        f"{variant} n/a: {t.reason}"
        for variant, t in result.timings.items()
        if t.reason and t.reason != "not asked for"
    ]
    if result.zeros is not None and result.zeros[1] > 1.5 * result.zeros[0]:
        found.append(f"{result.zeros[1]:.3g} ms on random data, {result.zeros[0]:.3g} on zeros")
    return found


def _table(title: str, *headers: str) -> Table:
    table = Table(*headers, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _peer(result: RowResult, peer: str, what: str, missed: bool) -> Text:
    time, ratio = result.time(peer, what), result.ratio(peer, what)
    if time is None or ratio is None:
        reason = result.timings.get(peer, Timing(reason="not asked for")).reason
        return Text(NOTHING if reason == "not asked for" else "n/a")
    target = f" <{result.row.targets.of(peer):g}" if missed else ""
    return Text(f"{milliseconds(time)} {_times(ratio)}{target}", style=LOSS if ratio < 1 else MISS if missed else "")


def _floor(result: RowResult, what: str, missed: bool) -> Text:
    time, part = result.time("floor", what), result.ratio("floor", what)
    if time is None or part is None:
        return Text(NOTHING)
    target = f" <{result.row.targets.floor:.0%}" if missed else ""
    return Text(f"{milliseconds(time)} {part:.0%}{target}", style=MISS if missed else "")


def _spread(found: Spread | None) -> Text:
    if found is None:
        return Text(NOTHING)
    text = Text(milliseconds(found.median), style="bold")
    return text.append(f" {milliseconds(found.low)}..{milliseconds(found.high)}", style="dim not bold")


def _first(timing: Timing | None) -> Text:
    if timing is None or timing.first is None or timing.second is None:
        return Text(NOTHING if timing is None or timing.reason == "not asked for" else "n/a")
    return Text(f"{milliseconds(timing.first)} {milliseconds(timing.second)}")


def _bytes(count: int | None) -> Text:
    if count is None:
        return Text(NOTHING)
    return Text(
        f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
    )


def milliseconds(value: float) -> str:
    """Three digits, without an exponent."""
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 1
        else f"{value:.3f}"
    )


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"
