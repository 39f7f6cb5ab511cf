"""What README and docs say is true: their code runs, the output that they show is the real one, links lead somewhere.

A ```python block is run, in one namespace per file, in order, with torch's kernels, which every machine has. If the
next block is a ```text one, it printed that.

    python tests/test_docs.py        # writes the real outputs into the ```text blocks, to be read before they are kept
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import pathlib
import re
import runpy
from typing import NamedTuple

import pytest
import torch
from test_structure import MAY_IMPORT

from fusible import calibration, kernels, ops, rules

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FENCE = re.compile(r"^```(\w*)[ ]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, and where that begins."""

    language: str
    text: str
    line: int
    start: int


def blocks_of(page: str) -> list[Block]:
    return [
        Block(found[1], found[2], page.count("\n", 0, found.start(2)) + 1, found.start(2))
        for found in FENCE.finditer(page)
    ]


def shown_output(blocks: list[Block], place: int) -> Block | None:
    """The ```text block next to a block, if there is one."""
    behind = blocks[place + 1 : place + 2]
    return behind[0] if behind and behind[0].language == "text" else None


def run_page(path: pathlib.Path):
    """Runs a page's python blocks in order; yields each block's output and the block that shows it, if any."""
    page = path.read_text()
    blocks = blocks_of(page)
    space = {"__name__": f"page_{path.stem.replace('-', '_')}"}
    for place, block in enumerate(blocks):
        if block.language != "python":
            continue
        code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), kernels.use("reference"), calibration.use(None):
            exec(code, space)
        yield block, printed.getvalue(), shown_output(blocks, place)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_of_a_page_runs_and_prints_what_is_shown(path):
    for block, printed, shown in run_page(path):
        if shown is not None:
            assert lines_of(printed) == lines_of(shown.text), f"{path.name}:{shown.line}: shows another output"
        else:
            assert not printed, f"{path.name}:{block.line}: prints something that the page does not show"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_ends_as_its_docstring_says(path, capsys):
    """The last line of an example's docstring is the last line that it prints."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert f"python examples/{path.name}" in docstring, "an example says how to run it"
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert lines_of(printed)[-1] == docstring.splitlines()[-1].strip()


def test_there_are_pages_and_examples_to_run():
    assert len(PAGES) >= 7
    assert len(EXAMPLES) >= 3
    assert all(any(block.language == "python" for block in blocks_of(path.read_text()))
               for path in PAGES if path.stem not in ("measured", "ops"))  # fmt: skip


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_relative_links_lead_somewhere(path):
    page = FENCE.sub("", path.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", page) + re.findall(r'(?:src|srcset|href)="([^"]+)"', page)
    assert links, "a page without links is a dead end"
    for link in links:
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name}: {link} does not exist"
        assert target.is_relative_to(ROOT), f"{path.name}: {link} leads out of the repository"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path.name}: {link} has no such heading"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_files_that_a_page_names_exist(path):
    """`fusible/plan.py` and its like; a page may leave out the package's name."""
    for name in re.findall(r"`([\w/]+\.(?:py|md|toml|svg|png))`", FENCE.sub("", path.read_text())):
        places = (ROOT / name, ROOT / "fusible" / name, path.parent / name)
        assert any(place.exists() for place in places), f"{path.name}: no {name}"


def test_quick_start_has_at_most_ten_lines():
    page = (ROOT / "README.md").read_text()
    _, _, section = page.partition("## Quick start")
    block = blocks_of(section)[0]
    assert block.language == "python"
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 10


def table_rows(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables by the name in their first cell."""
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").replace("\\|", "¦").split("|")]
        name = re.match(r"`(\w+)", cells[0])
        if line.startswith("|") and name:
            rows[name[1]] = cells
    return rows


def test_every_op_has_a_row_and_every_row_an_op():
    assert set(table_rows((ROOT / "docs" / "ops.md").read_text())) == set(ops.__all__)


def test_rows_of_ops_tell_the_record_and_the_twin():
    """Record fields and `torch.nn` twins are read off the classes, so that the page cannot go stale."""
    twins = {op: twin for twin, op in ops.TWINS.items()}
    for name, cells in table_rows((ROOT / "docs" / "ops.md").read_text()).items():
        op = getattr(ops, name)
        if name not in ("Linear", "Residual"):  # these stand for others
            fields = re.findall(r"`(\w+)`", cells[3])
            assert tuple(fields) == op.Saved.fields, f"docs/ops.md: {name} keeps {op.Saved.fields}"
        assert ("twin" in cells[4]) == (op in twins), f"docs/ops.md: {name} {'has' if op in twins else 'has no'} twin"


def test_every_shipped_rule_is_described():
    page = (ROOT / "docs" / "writing-a-rule.md").read_text()
    shipped = [name for name in rules.__all__ if name not in ("DEFAULT", "LEAN", "NONE")]
    assert set(table_rows(page)) >= set(shipped)


def test_map_of_the_files_is_that_of_the_structure_test():
    page = (ROOT / "docs" / "how-a-block-runs.md").read_text().partition("## The map")[2]
    rows = re.findall(r"^\| `([\w/]+?)(?:/|\.py)` \| .* \| (.*) \|$", page, re.MULTILINE)
    shown = {name.replace("/", "."): set(re.findall(r"`([\w.]+)`", imports)) for name, imports in rows}
    assert shown == {name: imports - {name, "_torch"} for name, imports in MAY_IMPORT.items()}


def test_picture_of_the_readme_is_that_of_the_plan():
    spec = importlib.util.spec_from_file_location("draw_plan", ROOT / "docs" / "draw_plan.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    caption = drawing.picture().caption()
    for name in ("plan-light.svg", "plan-dark.svg"):
        text = re.sub(r"\s+", " ", (ROOT / "docs" / name).read_text())
        assert caption in text, f"docs/{name} is old; run python docs/draw_plan.py"


def refresh() -> None:
    """Writes real outputs into the pages."""
    for path in PAGES:
        torch.manual_seed(0)
        page = path.read_text()
        found = [(printed, shown) for _, printed, shown in run_page(path) if shown is not None]
        for printed, shown in reversed(found):
            text = "\n".join(lines_of(printed)) + "\n"
            page = page[: shown.start] + text + page[shown.start + len(shown.text) :]
        path.write_text(page)
        print(f"{path.relative_to(ROOT)}: {len(found)} outputs")


if __name__ == "__main__":
    refresh()
