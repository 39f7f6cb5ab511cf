"""The commands and `fusible.info()`: what they print, and one clear line for each mistake."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import fusible
from fusible import _info, cli
from fusible.__main__ import main
from fusible.kernels import library, registry

pytestmark = pytest.mark.quick


def fails_in_one_line(capsys, arguments: list[str], message: str) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"fusible: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "Example: python -m fusible demo --steps 100"),
        (["--help"], "Example: python -m fusible demo --steps 100"),
        (["info", "--help"], "Example: python -m fusible info --json"),
        (["demo", "--help"], "Example: python -m fusible demo --steps 100 --text book.txt --out book-demo"),
    ],
)
def test_help_has_an_example(arguments, shown, capsys):
    assert cli.run(arguments) == 0
    assert shown in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["demo", "--width", "-8"], "--width must be at least 1, got -8"),
        (["demo", "--layers", "0"], "--layers must be at least 1, got 0"),
        (["demo", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["demo", "--seed", "-1"], "--seed must be between 0 and 2^63 - 1, got -1"),
        (
            ["demo", "--width", "30", "--heads", "4"],
            "--width must be a multiple of --heads, got 30 and 4; try --width 32",
        ),
        (["demo", "--text", "no/such.txt"], "--text no/such.txt: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    fails_in_one_line(capsys, arguments, message)


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["dmeo"], "No such command 'dmeo'."),
        (["info", "--jsn"], "No such option: --jsn"),
        (["demo", "--steps", "many"], "Invalid value for '--steps': "),
        (["demo", "--steps"], "Option '--steps' requires an argument."),
    ],
)
def test_what_typer_refuses_is_one_line(arguments, start, capsys):
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"fusible: {start}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must have more than 64 characters, got 0"),
        (b"a" * 64, "must have more than 64 characters, got 64"),
        (b"plain, then \xff", "must be UTF-8 text, got byte 12 that is not"),
    ],
)
def test_a_text_that_cannot_be_learned_is_one_line(content, message, capsys, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    fails_in_one_line(capsys, ["demo", "--text", str(path)], f"--text {path}: {message}")


def test_a_folder_as_text_or_a_file_as_folder_is_one_line(capsys, tmp_path):
    fails_in_one_line(capsys, ["demo", "--text", str(tmp_path)], f"--text {tmp_path}: Is a directory")
    path = tmp_path / "taken"
    path.write_text("")
    fails_in_one_line(capsys, ["demo", "--out", str(path)], f"--out {path}: File exists")


@pytest.mark.parametrize(("missing", "module"), [("typer", "fusible.cli"), ("matplotlib", "fusible.demo.picture")])
def test_a_missing_extra_is_named(missing, module, monkeypatch, capsys, tmp_path):
    for name in [name for name in sys.modules if name in ("fusible.cli", "fusible.demo.main", module)]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(missing + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["fusible", "demo", "--out", str(tmp_path)])
    assert main() == 2
    line = f"fusible: the commands need {missing}; install it with: pip install 'fusible[cli]'\n"
    assert capsys.readouterr().err == line


def test_an_error_of_our_own_is_not_taken_for_a_missing_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "fusible.cli")
    monkeypatch.setitem(sys.modules, "fusible.demo.config", None)
    monkeypatch.setattr(sys, "argv", ["fusible", "info"])
    with pytest.raises(ModuleNotFoundError, match=r"fusible\.demo\.config"):
        main()


def test_importing_is_silent_and_loads_none_of_the_extra():
    code = "import sys, fusible; print([m for m in ('typer', 'rich', 'matplotlib', 'triton') if m in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", code]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (finished.stdout, finished.stderr) == ("[]\n", "")


def test_the_module_runs_as_a_command():
    command = [sys.executable, "-m", "fusible", "info"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith("fusible ")


def test_info_reports_versions_devices_and_kernels(capsys):
    report = str(fusible.info())
    assert f"torch {torch.__version__}, Python {sys.version.split()[0]}" in report.splitlines()[0]
    threads = torch.get_num_threads()
    assert f"  cpu        yes  {threads} thread{'s' * (threads > 1)}, " in report
    assert f"  reference  yes  {len(registry.KERNELS)} kernels in plain torch, on every device" in report
    assert cli.run(["info"]) == 0
    assert capsys.readouterr().out == report + "\n"


def test_info_as_json_says_the_same(capsys):
    assert cli.run(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(fusible.info().to_dict()))
    assert [backend.name for backend in fusible.info().backends] == ["reference", "cpu", "triton"]


def test_info_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        fusible.info().torch = "3"


def test_info_says_why_a_backend_is_missing_and_counts_its_kernels_once_there(monkeypatch):
    def backend(name: str) -> tuple[bool, str]:
        found = next(b for b in fusible.info().backends if b.name == name)
        return found.available, found.detail

    def body(x):
        return x

    monkeypatch.setattr(registry, "KERNELS", {"made_up": registry.Kernel(body)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_info.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(library, "why_not", lambda: "not built; run: python -m fusible build")
    assert backend("cpu") == (False, "not built; run: python -m fusible build")
    assert backend("triton") == (False, "triton is not installed")
    monkeypatch.setattr(_info.importlib.util, "find_spec", lambda name: object())
    assert backend("triton") == (False, "no Triton kernels in this version")
    for name in ("cpu", "triton"):
        registry.KERNELS["made_up"].backend(name, lambda device, dtype, width: True)(body)
    assert backend("cpu") == (True, "1 kernel")
    assert backend("triton") == (False, "torch finds no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert backend("triton") == (True, "1 kernel")


FILE = """import torch, fusible
from fusible import ops
block = fusible.Sequential(ops.Residual(ops.RMSNorm(8), ops.Linear(8, 8)), ops.Tanh())
plain = torch.nn.Linear(8, 8)
example_inputs = torch.randn(4, 8, requires_grad=True)

@fusible.forward
def loses(act: ops.Tanh, /, x):
    y = torch.tanh(x) * 1.1
    return fusible.Out(y, act=ops.Tanh.Saved(y))

wrong = fusible.Sequential(ops.Tanh(), rules=(loses,))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("command", ["explain", "profile", "memory", "check", "audit"])
def test_commands_on_a_block(command, file, capsys):
    extra = {"profile": ["--rounds", "2"], "check": ["--no-gradcheck"]}.get(command, [])
    assert cli.run([command, f"{file}:block", *extra]) == 0
    assert "Linear" in capsys.readouterr().out or command == "check"
    assert cli.run([command, f"{file}:block", *extra, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"explain": "parts", "profile": "steps", "memory": "chains", "check": "findings", "audit": "ok"}[
        command
    ] in data
    assert cli.run([command, "--help"]) == 0
    assert f"Example: python -m fusible {command} model.py:" in " ".join(capsys.readouterr().out.split())
    wide = ["--input", "4x9"]
    assert cli.run([command, f"{file}:block", *extra, *wide]) == 2
    assert "RMSNorm (op 0.0): weight has 8 elements but x's last dimension is 9" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "audit"])
def test_a_fault_is_an_exit_code(command, file, capsys):
    extra = ["--no-gradcheck"] if command == "check" else []
    assert cli.run([command, f"{file}:wrong", *extra]) == 1
    assert "loses" in capsys.readouterr().out or command == "check"


def test_pages_and_pictures_are_written_where_they_should(file, tmp_path, capsys):
    assert cli.run(["explain", f"{file}:block", "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path / 'page.html'}\n")
    assert cli.run(["audit", f"{file}:block", "--plot", str(tmp_path / "errors.png")]) == 0
    assert (tmp_path / "errors.png").stat().st_size > 0
    capsys.readouterr()
    nowhere = tmp_path / "none" / "page.html"
    fails_in_one_line(
        capsys, ["explain", f"{file}:block", "--html", str(nowhere)], f"{nowhere}: No such file or directory"
    )
    name = f"{file}:plain"
    fails_in_one_line(
        capsys, ["memory", name], f"{name}: must be a fusible.Sequential, got Linear; name a block of the model"
    )
