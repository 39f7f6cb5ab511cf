"""The commands: `python -m fusible info`, `calibrate`, `demo`, `bench`, `build`; those on models are in `models`.

Needs the extra `cli`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import fusible
from fusible.demo.config import Config, InputError
from fusible.targets import TargetError

__all__ = ["app", "run"]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="fusible runs a chain of neural-network operations as one.",
    epilog="Example: python -m fusible demo --steps 100",
)
DEFAULT = Config()


def run(arguments: list[str]) -> int:
    """Runs a command and returns its exit code; a user's mistake is one line on stderr, and code 2."""
    try:
        return app(arguments or ["--help"], prog_name="python -m fusible", standalone_mode=False) or 0
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except (InputError, TargetError) as error:
        return _fail(str(error), 2)


def _fail(message: str, code: int) -> int:
    Console(stderr=True, soft_wrap=True).print(f"fusible: {' '.join(message.split())}", markup=False, highlight=False)
    return code


@app.command(epilog="Example: python -m fusible info --json")
def info(as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> None:
    """Show versions, devices, and which kernel backends are there."""
    report = fusible.info()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)


@app.command(epilog="Example: python -m fusible calibrate")
def calibrate() -> None:
    """Measure this machine, for the times that explain predicts; takes less than a minute on a quiet machine.

    The result is kept in the user's cache folder, or in the file that FUSIBLE_CALIBRATION names.
    """
    from rich.progress import Progress

    from fusible import calibration
    from fusible.calibrating import calibrate as measure
    from fusible.calibrating import tasks

    path = calibration.location()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(tasks()))
        found = measure(lambda what: progress.update(bar, advance=1, description=what))
    try:
        calibration.save(found, path)
    except OSError as error:
        raise TargetError(f"{path}: {error.strerror}") from error
    print(f"{found.summary()}\nkept in {path}")


@app.command(epilog="Example: CXX=clang++ python -m fusible build")
def build() -> None:
    """Build the C++ kernels beside the installed package; takes a minute and a C++ compiler."""
    from fusible.build import main

    raise typer.Exit(main())


@app.command(epilog="Example: python -m fusible demo --steps 100 --text book.txt --out book-demo")
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each variant.")] = DEFAULT.steps,
    width: Annotated[int, typer.Option(help="Width of the model; a multiple of --heads.")] = DEFAULT.width,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = DEFAULT.layers,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = DEFAULT.heads,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and sample.")] = DEFAULT.seed,
    out: Annotated[Path, typer.Option(help="Folder for picture, losses and weights.")] = Path("demo-out"),
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to learn from, instead of Python's manual.", show_default=False)
    ] = None,
) -> None:
    """Train one small language model twice, with torch.nn and with fusible, and compare.

    Takes about two minutes on two CPU cores. Writes demo.png, losses.csv and model.pt. Ctrl-C ends it early and saves
    what was trained so far.
    """
    config = Config(steps=steps, width=width, layers=layers, heads=heads, seed=seed)
    from fusible.demo.main import INTERRUPTED, run_demo
    from fusible.demo.worker import WorkerError

    console = Console()
    try:
        code = run_demo(config, out, text, console)
    except KeyboardInterrupt:
        console.print("Stopped.")
        code = INTERRUPTED
    except WorkerError as error:
        code = _fail(str(error), 1)
    raise typer.Exit(code)


@app.command(epilog="Example: python -m fusible bench rmsnorm 'mlp-*' --json bench.json --plot bench.png")
def bench(
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            help="Rows: a kind (rmsnorm), a group (large, small, mlps, half) or a pattern of names.", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a chart: .png, .svg, .pdf.", show_default=False)] = None,
    rounds: Annotated[int, typer.Option(help="Quiet rounds per row, at most.")] = 10,
    threads: Annotated[
        int | None, typer.Option(help="Threads; torch decides if not given.", show_default=False)
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Measure torch.compile too.")] = True,
    sweep: Annotated[bool, typer.Option(help="Many sizes against eager only, instead of the table.")] = False,
    check: Annotated[bool, typer.Option(help="Exit with 1 if a row misses its target.")] = False,
) -> None:
    """Time blocks against plain PyTorch: eager, eager with a tuned malloc, and torch.compile.

    Each result is checked before it is timed. Run it on a quiet machine; rounds in which it is not are left out, and
    counted. Ctrl-C ends it early and shows what was measured so far.
    """
    from fusible.bench.main import Options, run_bench

    options = Options(tuple(rows or ()), json_file, plot, rounds, threads, compiled, sweep, check)
    raise typer.Exit(run_bench(options, Console()))


from fusible.cli import models  # noqa: E402 - adds its commands to `app`

app.add_typer(models.app)
