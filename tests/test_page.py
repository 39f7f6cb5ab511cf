"""The page of explanations and profiles: its structure, and what it does in a browser."""

from __future__ import annotations

import html
import html.parser
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

import fusible
from fusible import calibration, ops

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
NO_BROWSER = "no Chromium was found; apt-get install chromium to try the page in a browser"
VOID = {"meta", "link", "br", "img", "input"}


class Reader(html.parser.HTMLParser):
    """What a page holds, and that its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def of(self, name: str, kind: str = "") -> list[dict]:
        return [attrs for tag, attrs in self.tags if tag == name and kind in ("", *attrs.get("class", "").split(" "))]


def block() -> fusible.Sequential:
    return fusible.Sequential(
        ops.Residual(ops.RMSNorm(8), ops.Linear(8, 24, bias=False), ops.SwiGLU(), ops.Linear(12, 8)), ops.Tanh()
    )


def page(tmp_path, report) -> tuple[str, Reader]:
    path = tmp_path / "page.html"
    report.to_html(path)
    text = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return text, reader


def explanation():
    with fusible.kernels.use("reference"), calibration.use(None):
        return block().explain(torch.randn(4, 8, requires_grad=True))


def test_every_op_is_a_column_and_every_step_a_bracket_over_its_ops(tmp_path):
    found = explanation()
    text, reader = page(tmp_path, found)
    part = found.parts[0]
    assert len(reader.of("div", "op")) == len(part.ops)
    assert len(reader.of("div", "skipped")) == sum(op.skipped for op in part.ops) == 1
    assert len(reader.of("button", "forward")) == len(part.forward)
    assert len(reader.of("button", "backward")) == len(part.backward)
    names = [op.name for op in part.ops]
    for row, box in zip(part.forward, reader.of("button", "forward"), strict=True):
        start, stop = map(int, re.findall(r"\d+", box["style"]))
        covered = row.ops.split(", ")
        assert (start, stop) == (names.index(covered[0]) + 1, names.index(covered[-1]) + 2)
        assert row.ops in box["data-detail"]
    assert "not calibrated, run python -m fusible calibrate" in text
    assert all(word in text for word in ("Kept for backward", "Not fused", "smallest change"))


def test_it_needs_no_network_and_escapes_what_it_shows(tmp_path):
    class Evil(torch.nn.Module):
        """Named by its user."""

        def forward(self, x):
            return x

    Evil.__name__ = "<script>alert(1)</script>"
    text, reader = page(tmp_path, fusible.Sequential(Evil(), ops.SiLU()).explain(torch.randn(2, 4)))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert not re.search(r"https?://|@import|url\(", text)
    assert len(reader.of("script")) == 1


def test_alike_blocks_of_a_model_are_drawn_once(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([block() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    text, reader = page(tmp_path, fusible.explain(Model(), torch.randn(4, 8, requires_grad=True)))
    assert len(reader.of("section")) == 1
    assert "(3 alike)" in text


def test_a_profile_has_measured_times(tmp_path):
    found = fusible.profile(block(), torch.randn(4, 8, requires_grad=True), rounds=2)
    text, reader = page(tmp_path, found)
    assert len(reader.of("button", "step")) == len(found.steps)
    assert "measured time over the floor" in text


@pytest.mark.quick
def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        explanation().to_html(tmp_path / "no folder" / "page.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"^a page needs Jinja2; pip install 'fusible\[cli\]'$"):
        explanation().to_html(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_it_opens_without_errors_and_sorts_in_a_browser(tmp_path):
    path = tmp_path / "page.html"
    explanation().to_html(path)
    probe = """<script>
      const errors = []; window.addEventListener("error", event => errors.push(event.message));
      window.addEventListener("load", () => {
        const table = document.querySelector("table"), button = table.querySelectorAll("th button")[1];
        const read = () => [...table.tBodies[0].rows].map(row => row.cells[1].textContent);
        button.click(); const up = read(); button.click(); const down = read();
        const step = document.querySelector(".step"); step.focus();
        document.title = JSON.stringify({up, down, sort: button.parentElement.getAttribute("aria-sort"),
          detail: document.querySelector(".detail").textContent, errors});
      });
    </script></body>"""
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    title = html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.S)[1])
    said = json.loads(title)
    assert said["errors"] == []
    assert said["up"] == sorted(said["up"])
    assert said["down"] == said["up"][::-1]
    assert said["sort"] == "descending"
    assert said["detail"].startswith("0 MakeExtraOutput")
