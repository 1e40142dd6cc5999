"""Prediction and measurement never import each other, and prediction needs no torch.

Read from the syntax tree of every file under src/actmem, so that a new file is covered by
being there, and checked again by importing with torch and numpy refused.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "actmem"

PREDICTION = {"config", "rows", "models", "paper", "schedule", "formulas"}
MEASUREMENT = {"keep", "parallel", "model", "measure", "recompute", "peers"}
#: Neither side.  The pipeline runs a schedule, and lab is where both sides meet.
OTHER = {"show", "pipeline", "lab"}

#: part -> what none of its files may import anywhere, not even inside a function.
NEVER = {
    **{part: {"torch", "actmem.lab", "actmem.pipeline", *(f"actmem.{m}" for m in MEASUREMENT)} for part in PREDICTION},
    **{part: {"actmem.formulas", "actmem.show", "actmem.paper", "actmem.schedule", "actmem.lab"} for part in MEASUREMENT},
    "pipeline": {"actmem.formulas", "actmem.show", "actmem.paper", "actmem.lab"},
    "show": {"torch", "numpy", "actmem.pipeline", *(f"actmem.{m}" for m in MEASUREMENT)},
}
#: What only show may import when it is loaded.
SCREEN = {"jupyter", "jupyterlab", "jupyter_client", "jupyter_core", "IPython", "ipykernel", "ipywidgets", "anywidget", "plotly"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """The name under actmem that a file belongs to: "formulas" for actmem/formulas/table2.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def module_of(path):
    parts = ("actmem", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source, module, is_package=False, at_load_only=False):
    """Full dotted names that a file imports; with at_load_only, those outside functions."""
    found = set()

    def visit(node):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*package, *([base] if base else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("__import__", "import_module"):
            found.update(argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))
        if at_load_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def imports_in(path, at_load_only=False):
    return imports_of(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py", at_load_only)


def among(names, forbidden):
    """The names that are one of ``forbidden`` or lie inside one."""
    return sorted(name for name in names if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden))


def test_files_were_found_and_each_belongs_to_a_known_part():
    parts = {part_of(path) for path in FILES}
    assert {"__init__", "config", "rows", "models", "formulas", "parallel", "model", "measure", "recompute", "show", "lab"} <= parts
    assert parts <= {"__init__"} | PREDICTION | MEASUREMENT | OTHER, "name the new part in PREDICTION, MEASUREMENT or OTHER"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", "torch.nn"),
        ("from torch import nn", "torch.nn"),
        ("def f():\n    import torch", "torch"),
        ("if True:\n    from torch import nn", "torch.nn"),
        ("from actmem import measure", "actmem.measure"),
        ("from . import measure", "actmem.show.measure"),
        ("from .. import measure", "actmem.measure"),
        ("from ..measure.ledger import record", "actmem.measure.ledger.record"),
        ("importlib.import_module('torch')", "torch"),
        ("__import__('torch')", "torch"),
    ],
)
def test_every_form_of_import_is_seen(source, expected):
    assert imports_of(source, "actmem.show.tables") == {expected}


def test_relative_imports_of_a_package_start_at_the_package():
    assert imports_of("from . import tables", "actmem.show", is_package=True) == {"actmem.show.tables"}
    assert imports_of("from .. import rows", "actmem.show", is_package=True) == {"actmem.rows"}


def test_imports_inside_functions_are_not_made_on_load():
    source = "import json\nclass A:\n    import csv\n    def f(self):\n        import plotly\nasync def g():\n    import plotly"
    assert imports_of(source, "actmem.lab.x", at_load_only=True) == {"json", "csv"}
    assert imports_of(source, "actmem.lab.x") == {"json", "csv", "plotly"}


def test_names_are_compared_whole():
    assert among({"torch", "torch.nn", "torchvision", "actmem.models"}, {"torch", "actmem.model"}) == ["torch", "torch.nn"]


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in NEVER], ids=module_of)
def test_arrows(path):
    assert among(imports_in(path), NEVER[part_of(path)]) == []


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) != "show"], ids=module_of)
def test_nothing_but_show_loads_jupyter_or_plotly(path):
    assert among(imports_in(path, at_load_only=True), SCREEN) == []


def test_import_actmem_loads_no_other_part():
    assert among(imports_in(PACKAGE / "__init__.py"), {"torch", "numpy", "actmem"}) == []


REFUSE = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name)
"""


def import_without_torch(*names):
    """Import each name in a process of its own that has neither torch nor numpy."""
    return subprocess.run([sys.executable, "-c", REFUSE, *names], capture_output=True, text=True)


def test_prediction_and_show_work_with_neither_torch_nor_numpy():
    names = [module_of(path) for path in FILES if part_of(path) in {"__init__", "show"} | PREDICTION]
    assert {"actmem", "actmem.formulas.activations"} < set(names)
    done = import_without_torch(*names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names


@pytest.mark.parametrize("name", ["torch", "numpy", "actmem.model.layer"])
def test_the_refusal_works(name):
    done = import_without_torch(name)
    assert done.returncode == 1
    assert "No module named" in done.stderr.splitlines()[-1]
