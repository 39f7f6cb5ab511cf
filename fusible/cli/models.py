"""The commands on a block or model: `explain`, `profile`, `memory`, `check`, `audit`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import fusible
from fusible.targets import Target, TargetError

__all__ = ["app"]

app = typer.Typer()

TargetName = Annotated[str, typer.Argument(metavar="FILE.py:OBJECT", help="A module, or a function that makes one.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="Sizes and dtype of an input, as 8x512 or 8x512:bfloat16; once for each. Else the file's example_inputs.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page, one file, for a browser.", show_default=False)]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw a picture: .png, .svg, .pdf.", show_default=False)]


def _load(target: str, inputs: list[str] | None, needed: bool = True) -> Target:
    from fusible.targets import load

    found = load(target, inputs or ())
    if needed and not found.args and not found.kwargs:
        raise TargetError(f"{target}: no inputs; pass --input 8x512, or put example_inputs into the file")
    return found


def _run(target: str, function: Callable[[], Any]) -> Any:
    """What a function of the library returns; its errors of input are the user's, in one line."""
    try:
        return function()
    except (TypeError, ValueError) as error:
        raise TargetError(f"{target}: {error}") from error


def _show(report: Any, as_json: bool, plot: Path | None = None, html: Path | None = None) -> None:
    """Prints a report, or writes it where the user said."""
    for path, write in ((plot, "plot"), (html, "to_html")):
        if path is None:
            continue
        try:
            getattr(report, write)(path)
        except OSError as error:
            raise TargetError(f"{path}: {error.strerror or error}") from error
        except (ImportError, ValueError) as error:
            raise TargetError(str(error)) from error
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
    for path in (plot, html):
        if path is not None and not as_json:
            print(f"\nwrote {path}")


@app.command(epilog="Example: python -m fusible explain model.py:block --input 8x512 --html block.html")
def explain(
    target: TargetName,
    inputs: Inputs = None,
    as_json: Json = False,
    html: Html = None,
    mermaid: Annotated[bool, typer.Option(help="As a Mermaid flowchart.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if something did not fuse.")] = False,
) -> None:
    """Show what runs fused in a block or model, what each step moves and costs, and why the rest did not fuse.

    Nothing is run. Without --input, the file may hold example_inputs: a tensor, several, or a function that makes them.
    """
    found = _load(target, inputs, needed=False)
    explanation = _run(target, lambda: fusible.explain(found.module, *found.args, **found.kwargs))
    if mermaid:
        print(explanation.to_mermaid())
    else:
        _show(explanation, as_json, html=html)
    if strict and explanation.unfused:
        raise typer.Exit(1)


@app.command(epilog="Example: python -m fusible profile model.py:block --input 4096x512 --plot roofline.png")
def profile(
    target: TargetName,
    inputs: Inputs = None,
    rounds: Annotated[int, typer.Option(help="Calls that are timed as a whole, and as many step by step.")] = 20,
    as_json: Json = False,
    html: Html = None,
    plot: Plot = None,
) -> None:
    """Time each step of a block or model, forward and backward, beside its floor on this machine."""
    found = _load(target, inputs)
    report = _run(target, lambda: fusible.profile(found.module, *found.args, rounds=rounds, **found.kwargs))
    _show(report, as_json, plot, html)


@app.command(epilog="Example: python -m fusible memory model.py:block --input 4096x512")
def memory(target: TargetName, inputs: Inputs = None, as_json: Json = False) -> None:
    """Show what a block keeps for backward, its peaks, and what could be computed again instead. Nothing is run."""
    found = _load(target, inputs)
    block = found.module
    if not isinstance(block, fusible.Sequential):
        raise TargetError(
            f"{target}: must be a fusible.Sequential, got {type(block).__name__}; name a block of the model"
        )
    _show(_run(target, lambda: fusible.memory_plan(block, *found.args, **found.kwargs)), as_json)


@app.command(epilog="Example: python -m fusible check model.py:block --input 4x64")
def check(
    target: TargetName,
    inputs: Inputs = None,
    gradcheck: Annotated[bool, typer.Option(help="Compare with finite differences too.")] = True,
    as_json: Json = False,
) -> None:
    """Prove a block or op, fused as it is, against its plain formulas; exit with 1 if a property does not hold."""
    from fusible import testing

    found = _load(target, inputs, needed=False)
    given: Any = found.module
    if isinstance(given, fusible.Sequential) and found.args:  # whose texts are clearer than those of a failed proof
        _run(target, lambda: given.explain(*found.args, **found.kwargs))
    report = _run(target, lambda: testing.report(given, *found.args, gradcheck=gradcheck, **found.kwargs))
    _show(report, as_json)
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog="Example: python -m fusible audit model.py:model --input 8x512 --plot errors.png")
def audit(target: TargetName, inputs: Inputs = None, as_json: Json = False, plot: Plot = None) -> None:
    """Compare a model plain and fused with a float64 run, op by op; exit with 1 if fused is worse beyond tolerance."""
    found = _load(target, inputs)
    report = _run(target, lambda: fusible.audit(found.module, *found.args, **found.kwargs))
    _show(report, as_json, plot)
    raise typer.Exit(0 if report.ok else 1)
