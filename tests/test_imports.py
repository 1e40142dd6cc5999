"""Prediction and measurement never import each other, and prediction needs no torch.

Read from the syntax tree of every file under src/actmem, so that a new file is covered by
being there, and checked again by importing with torch and numpy refused.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import actmem

SOURCE = Path(__file__).resolve().parents[1] / "src"


def rooms(package, names):
    return {f"{package}.{name}" for name in names.split()}


PREDICTION = rooms("actmem", "attention_kernels command_line config rows recipes llama_shape models formulas plan")
MEASUREMENT = rooms("actmem", "keep main_grad parallel layers measure recompute drop store torch_private")
#: Records, and solves what it has seen; prediction reads the result, and nothing of it but that.
TAPE = {"actmem.tape"}
TAPE_READERS = {"actmem.tape.blocks", "actmem.tape.evaluate", "actmem.tape.stage_tapes"}
#: Neither side: it runs the layer on a pipeline.
RUNTIME = {"actmem.pipeline"}
#: Where prediction and measurement meet in the library.
MEETING = {"actmem.verify"}
#: The commands, each loaded by its name when it is asked for.
COMMANDS = {"actmem.__main__"}
#: What the course draws with, and facts about others: in a page there is neither torch nor numpy.
SCREEN = {"actmem_course.others", "actmem_course.results", "actmem_course.show"}
#: Where both sides meet.
COURSE = rooms(
    "actmem_course",
    "arguments console copies cut files guard keep_pictures launch make_copies pieces process rank_store "
    "ranks standard_library start bench judge",
)

RECORDING = {f"actmem.tape.{name}" for name in ("record", "solver", "model_tape", "tape_command")}

#: part -> what none of its files may import anywhere, not even inside a function.
NEVER = {
    **{
        part: {"torch", "numpy", "actmem_course", *RUNTIME, *MEASUREMENT, *MEETING, *RECORDING}
        for part in PREDICTION | TAPE_READERS
    },
    **{part: {"actmem.formulas", "actmem.plan", "actmem_course", *MEETING} for part in TAPE},
    **{part: {"actmem.formulas", "actmem.plan", "actmem_course", *MEETING} for part in MEASUREMENT},
    **{part: {"actmem.formulas", "actmem_course"} for part in RUNTIME},
    **{part: {"actmem_course"} for part in MEETING | COMMANDS},
    **{part: {"torch", "numpy", *RUNTIME, *MEASUREMENT, *COURSE} for part in SCREEN},
}
#: What only show may import when it is loaded.
NOTEBOOK_PACKAGES = {"jupyter", "jupyterlab", "jupyter_client", "jupyter_core", "IPython", "ipykernel", "ipywidgets", "anywidget", "plotly"}  # fmt: skip

FILES = sorted(SOURCE.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(path):
    """The room that a file belongs to: "actmem.formulas" for actmem/formulas/flops.py."""
    module = module_of(path)
    return module if module in TAPE_READERS | MEETING else ".".join(module.split(".")[:2])


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
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
            "__import__",
            "import_module",
        ):
            found.update(loaded_by_name(argument) for argument in node.args[:1])
        if at_load_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def loaded_by_name(argument):
    """What an import by name loads: a name, or of one that is put together the beginning and a star."""
    if isinstance(argument, ast.Constant):
        return argument.value
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) else None
    return str(first.value) + "*" if isinstance(first, ast.Constant) else "*"


def import_graph(names_by_module):
    """Module → modules of ours that it imports: at load, inside functions, or by name."""
    graph = {}
    for module, names in names_by_module.items():
        graph[module] = set()
        for name in names:
            if name.endswith("*"):
                graph[module] |= {other for other in names_by_module if other.startswith(name[:-1])}
            while "." in name and name not in names_by_module:
                name = name.rpartition(".")[0]
            if name in names_by_module:
                graph[module].add(name)
    return graph


def imports_in(path, at_load_only=False):
    return imports_of(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py", at_load_only)


def among(names, forbidden):
    """The names that are one of ``forbidden`` or lie inside one."""
    return sorted(name for name in names if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden))


def test_each_file_belongs_to_a_known_part():
    parts = {part_of(path) for path in FILES}
    known = PREDICTION | MEASUREMENT | TAPE | TAPE_READERS | RUNTIME | MEETING | COMMANDS | SCREEN | COURSE
    assert parts == {"actmem", "actmem_course"} | known, "name the new part above"


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
        ("importlib.import_module(f'actmem.{name}.x')", "actmem.*"),
        ("importlib.import_module(name)", "*"),
    ],
)
def test_every_form_of_import_is_seen(source, expected):
    assert imports_of(source, "actmem.show.tables") == {expected}


def test_relative_imports_of_a_package_start_at_the_package():
    assert imports_of("from . import tables", "actmem.show", is_package=True) == {"actmem.show.tables"}
    assert imports_of("from .. import rows", "actmem.show", is_package=True) == {"actmem.rows"}


def test_imports_inside_functions_are_not_made_on_load():
    source = "import json\nclass A:\n    import csv\n    def f(self):\n        import plotly\nasync def g():\n    import plotly"
    assert imports_of(source, "actmem_course.x", at_load_only=True) == {"json", "csv"}
    assert imports_of(source, "actmem_course.x") == {"json", "csv", "plotly"}


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in NEVER], ids=module_of)
def test_arrows(path):
    assert among(imports_in(path), NEVER[part_of(path)]) == []


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) not in SCREEN], ids=module_of)
def test_nothing_but_show_loads_jupyter_or_plotly(path):
    assert among(imports_in(path, at_load_only=True), NOTEBOOK_PACKAGES) == []


def test_no_file_imports_itself_by_way_of_others():
    # The front door names everything, and loads a part only when a program asks for it.
    inside = [path for path in FILES if module_of(path) != "actmem"]
    graph = import_graph({module_of(path): imports_in(path) for path in inside})
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_front_door_loads_nothing_until_a_name_is_asked_for():
    """Each name is typed for an IDE, and all that needs no torch works without it."""
    program = """
import sys, actmem
assert not [name for name in sys.modules if name.startswith(("torch", "numpy", "actmem."))]
from actmem import LlamaShape, ModelShape, Parallel, compare, layer_rows, plan, tape
assert len(layer_rows(ModelShape(8, 2, 16, 4), Parallel(2))) == 15
assert "torch" not in sys.modules
from actmem import *
assert {name for name in actmem.__all__} <= set(dir(actmem)) & set(globals())
print(record.__module__, GPT.__module__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["actmem.measure.ledger", "actmem.layers.gpt"]


def test_every_name_of_the_front_door_is_typed():
    tree = ast.parse((SOURCE / "actmem" / "__init__.py").read_text(encoding="utf-8"))
    typed = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(actmem.__all__) <= typed


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
    names = [module_of(path) for path in FILES if part_of(path) in {"actmem", "actmem_course"} | SCREEN | PREDICTION]
    assert {"actmem", "actmem.formulas.activations"} < set(names)
    done = import_without_torch(*names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names


@pytest.mark.parametrize("name", ["torch", "numpy", "actmem.layers.transformer"])
def test_the_refusal_works(name):
    done = import_without_torch(name)
    assert done.returncode == 1
    assert "No module named" in done.stderr.splitlines()[-1]


def private_names_of_others(source, is_ours):
    """Names with a leading underscore that a file takes from another module of ours: imported, or read as ``module._name``."""
    tree, found, modules = ast.parse(source), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            modules.update(alias.asname or alias.name for alias in node.names)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                found.add(f"{node.value.id}.{node.attr}")
    return sorted(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from actmem.parallel.rng import DropoutMask, _Drop", ["actmem.parallel.rng._Drop"]),
        ("from actmem import recompute\nrecompute._Region", ["recompute._Region"]),
        ("from actmem import recompute as r\nx = r._Region._run_again", ["r._Region"]),
        ("from actmem.parallel.rng import Mask\nMask._mask", ["Mask._mask"]),
        ("from torch import _C\nfrom actmem import keep\nkeep.__doc__, self._x, _C._y", []),
    ],
)
def test_private_names_are_seen(source, expected):
    assert private_names_of_others(source, lambda module: module.startswith("actmem")) == expected


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_reads_another_files_private_names(path):
    source = path.read_text(encoding="utf-8")
    assert private_names_of_others(source, lambda module: module.split(".")[0] in ("actmem", "actmem_course")) == []


def test_readme_says_how_long_the_core_is_that_one_reads_in_one_sitting():
    readme = (SOURCE.parent / "README.md").read_text(encoding="utf-8")
    said, table = re.search(r"about ([\d,]+) lines\. Read them in this order:\n\n(.*?)\n\n", readme, re.DOTALL).groups()
    lines, folder = 0, SOURCE
    for name in re.findall(r"`([\w/]+\.py)`", table):
        path = SOURCE.parent / name if name.startswith("src/") else folder / name
        folder = path.parent
        lines += len(path.read_text(encoding="utf-8").splitlines())
    assert int(said.replace(",", "")) == round(lines, -2) <= 1_900
