"""The folders' law: who may import whom, how long a file or function may be, where private torch names live."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "fusible"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Per module (or folder): the modules of fusible that it may import. Later ones build on earlier ones.
MAY_IMPORT = {
    "_torch": set(),
    "names": set(),
    "op": {"names"},
    "kernels.registry": set(),
    "kernels": {"_torch", "build", "kernels"},
    "ops": {"op", "kernels", "ops", "_torch"},
    "rule": {"op"},
    "rules": {"op", "ops", "rule", "kernels", "rules"},
    "chain": {"_torch", "op", "ops"},
    "infer": {"_torch", "op", "chain"},
    "graph_op": {"_torch", "op"},
    "plan": {"op", "rule", "chain"},
    "segments": {"chain", "plan"},
    "checkpoint": {"op", "chain", "infer", "executable"},
    "planner": {"op", "rule", "chain", "infer", "graph_op", "plan", "executable", "checkpoint", "segments"},
    "footprint": {"_torch", "op", "plan", "codegen", "graph_op", "kernels.registry"},
    "options": {
        "op",
        "ops",
        "rule",
        "rules",
        "chain",
        "plan",
        "planner",
        "footprint",
        "costs",
        "calibration",
        "dry_run",
    },
    "budget": {"rule", "rules", "chain", "infer", "plan", "planner", "footprint", "options"},
    "scope": {"rule", "rules", "budget"},
    "memory_report": {
        "rule",
        "chain",
        "plan",
        "planner",
        "fuser",
        "budget",
        "footprint",
        "options",
        "explaining",
        "explanation",
        "calibration",
        "sequential",
    },
    "checked": {"_torch", "op", "plan"},
    "codegen": {"op", "chain", "plan", "graph_op"},
    "executable": {"_torch", "infer", "plan", "segments", "checked", "codegen", "graph_op"},
    "main_grad": {"_torch"},
    "node": {"_torch", "executable", "main_grad"},
    "fuser": {"_torch", "rule", "chain", "plan", "planner", "executable", "node", "kernels.registry", "budget"},
    "calibration": {"kernels"},
    "costs": {"_torch", "op", "kernels.registry", "calibration"},
    "dry_run": {"_torch", "plan", "executable", "costs"},
    "explanation": {"rule", "report"},
    "report": {"explanation", "profile_report", "report", "rule"},
    "explaining": {
        "_torch",
        "op",
        "ops",
        "chain",
        "infer",
        "plan",
        "codegen",
        "fuser",
        "calibration",
        "costs",
        "dry_run",
        "explanation",
    },
    "sequential": {
        "_torch",
        "op",
        "ops",
        "rule",
        "rules",
        "chain",
        "infer",
        "fuser",
        "calibration",
        "explaining",
        "explanation",
        "scope",
    },
    "sampling": {"op", "ops"},
    "model_explanation": {"_torch", "calibration", "explaining", "explanation", "scope", "sequential"},
    "calibrating": {"calibration", "costs", "dry_run", "executable", "ops", "sequential"},
    "targets": set(),
    "borrowing": {"op", "ops"},
    "adapting": {"adapters"},
    "forgetting": {"_torch", "op"},
    "fusing": {
        "_torch",
        "adapting",
        "borrowing",
        "chain",
        "forgetting",
        "fuser",
        "op",
        "ops",
        "rules",
        "scope",
        "sequential",
    },
    "fuse_report": set(),
    "fused": {"_torch", "adapting", "fuse_report", "fuser", "fusing"},
    "adapters": {"adapters", "adapting", "borrowing", "chain", "fuser", "fusing", "op", "ops"},
    "diagnosis": set(),
    "tolerance": {"diagnosis"},
    "trial": {"kernels", "sequential", "tolerance"},
    "_progress": set(),
    "parts": {"sequential"},
    "tracing": {"chain", "codegen", "executable", "fuser", "parts", "plan", "rules"},
    "charts": set(),
    "audit_report": {"charts"},
    "auditing": {
        "_progress",
        "audit_report",
        "chain",
        "kernels",
        "parts",
        "plan",
        "tolerance",
        "tracing",
        "trial",
    },
    "profile_report": {"charts", "explanation", "report"},
    "profiling": {
        "_progress",
        "calibration",
        "chain",
        "costs",
        "executable",
        "explanation",
        "fuser",
        "ops",
        "parts",
        "plan",
        "profile_report",
        "sequential",
    },
    "properties": {"tolerance", "trial", "op", "rule", "rules", "codegen", "executable", "sequential"},
    "testing": {"_progress", "op", "properties", "rule", "rules", "sequential"},
    "_info": {"kernels", "kernels.registry"},
    "memory": {"kernels"},
    "build": set(),
}
FREE = ("__init__", "__main__", "bench", "cli", "demo")


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def owner_of(name: str) -> str:
    while name not in MAY_IMPORT and "." in name:
        name = name.rpartition(".")[0]
    return name


def imports(path: pathlib.Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fusible":
            module = node.module.removeprefix("fusible").removeprefix(".")
            names = [f"{module}.{a.name}" if module else a.name for a in node.names]
            exists = [(PACKAGE / n.replace(".", "/")).with_suffix(".py").exists() for n in names]
            found += [(node.lineno, n if ok or not module else module) for n, ok in zip(names, exists, strict=True)]
        elif isinstance(node, ast.Import):
            found += [
                (node.lineno, a.name.removeprefix("fusible.")) for a in node.names if a.name.startswith("fusible")
            ]
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_follow_the_layers(path):
    name = name_of(path)
    if name.split(".")[0] in FREE:
        return
    allowed = MAY_IMPORT[owner_of(name)]
    for line, imported in imports(path):
        ok = any(imported == a or imported.startswith(a + ".") for a in allowed)
        assert ok, f"{path.name}:{line}: {name} may not import {imported}; it may import {sorted(allowed)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400, f"{path.name} has {len(text.splitlines())} lines; 400 at most"
    limit = 150 if "kernels" in path.parts else 60
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= limit, f"{path.name}:{node.lineno}: {node.name} has {length} lines; {limit} at most"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_torch_names_live_in_one_file(path):
    if path.name == "_torch.py":
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not re.search(r"\btorch\.(\w+\.)*_[a-z]|\btorch\._C\b", line), f"{path.name}:{number}: {line.strip()}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_asks_what_an_object_is_by_probing(path):
    probes = {"hasattr": 2, "getattr": 3}  # getattr with a default
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and len(node.args) == probes.get(node.func.id)
        ):
            assert path.name in ("_torch.py", "chain.py", "explanation.py", "main_grad.py"), (
                f"{path.name}:{node.lineno}: {node.func.id}"
            )


def test_only_autograd_knowing_files_define_functions():
    for path in FILES:
        if path.name in ("node.py", "_torch.py"):
            continue
        assert "autograd.Function" not in re.sub(r'`+[^`]*`+|"""(.|\n)*?"""', "", path.read_text()), path.name
