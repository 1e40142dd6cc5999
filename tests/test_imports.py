"""What files of src may import and name: prediction and measurement never import each other, and prediction needs no torch.

Read from the syntax tree of every file, so that a new file is covered by being there, and checked again by importing
with torch and numpy refused.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import actmem
from actmem.recipes import RECOMPUTE_MODES

SOURCE = Path(__file__).resolve().parents[1] / "src"


def rooms(package, names):
    return {f"{package}.{name}" for name in names.split()}


PREDICTION = rooms("actmem", "attention_kernels command_line config rows recipes llama_shape formulas plan")
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
    "ranks standard_library bench judge",
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

TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
#: torch's private names are used here only; the file says on which versions it was checked.
PRIVATE_FILE = SOURCE / "actmem" / "torch_private.py"
#: Attributes of torch's objects without an underscore that no documentation names.
UNDOCUMENTED = {"fwd_cache", "args_recv_info", "StorageWeakRef"}
#: Solutions and cases are called as what they solve and judge, and labs teach names that the library has.
SOLUTIONS = [SOURCE / "actmem_course" / "judge" / folder for folder in ("solutions", "cases", "mistakes")]
#: Names that several files may define, and why.
SHARED = {"main", "FUNCTIONS"}  # a command's entry point; where a trace finds a file's autograd functions


def module_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(path):
    """The room that a file belongs to: "actmem.formulas" for actmem/formulas/flops.py."""
    module = module_of(path)
    return module if module in TAPE_READERS | MEETING else ".".join(module.split(".")[:2])


def imports_of(tree, module, is_package=False, at_load_only=False):
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
            "import_module",
        ):
            found.update(loaded_by_name(argument) for argument in node.args[:1])
        if at_load_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def loaded_by_name(argument):
    """What an import by name loads: a name, or of one that is put together the beginning and a star."""
    if isinstance(argument, ast.Constant):
        return argument.value
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) else None
    return str(first.value) + "*" if isinstance(first, ast.Constant) else "*"


def imports_in(path, at_load_only=False):
    return imports_of(TREES[path], module_of(path), path.name == "__init__.py", at_load_only)


def among(names, forbidden):
    """The names that are one of ``forbidden`` or lie inside one."""
    return sorted(name for name in names if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden))


def test_each_file_belongs_to_a_known_part():
    known = PREDICTION | MEASUREMENT | TAPE | TAPE_READERS | RUNTIME | MEETING | COMMANDS | SCREEN | COURSE
    assert {part_of(path) for path in TREES} == {"actmem", "actmem_course"} | known, "name the new part above"


@pytest.mark.parametrize(
    ("source", "module", "is_package", "expected"),
    [
        ("import torch.nn as nn\nfrom csv import reader", "actmem.show.x", False, {"torch.nn", "csv.reader"}),
        ("async def f():\n    if True:\n        import torch", "actmem.show.x", False, {"torch"}),
        ("from . import a\nfrom .. import b\nfrom ..c.d import e", "actmem.show.x", False, {"actmem.show.a", "actmem.b", "actmem.c.d.e"}),
        ("from . import a\nfrom .. import b", "actmem.show", True, {"actmem.show.a", "actmem.b"}),
        ("importlib.import_module('torch')\n__import__('csv')", "actmem.x", False, {"torch", "csv"}),
        ("import_module(f'actmem.{name}.x')\nimport_module(name)", "actmem.x", False, {"actmem.*", "*"}),
    ],
)  # fmt: skip
def test_every_form_of_import_is_seen(source, module, is_package, expected):
    assert imports_of(ast.parse(source), module, is_package) == expected


def test_imports_inside_functions_are_not_made_on_load():
    source = "import json\nclass A:\n    import csv\n    def f(self):\n        import plotly\n"
    source += "async def g():\n    import re"
    assert imports_of(ast.parse(source), "actmem_course.x", at_load_only=True) == {"json", "csv"}


@pytest.mark.parametrize("path", TREES, ids=module_of)
def test_arrows(path):
    assert among(imports_in(path), NEVER.get(part_of(path), ())) == []
    if part_of(path) not in SCREEN:
        assert among(imports_in(path, at_load_only=True), NOTEBOOK_PACKAGES) == []


def test_no_file_imports_itself_by_way_of_others():
    # The front door names everything, and loads a part only when a program asks for it.
    names_by_module = {module_of(path): imports_in(path) for path in TREES if module_of(path) != "actmem"}
    graph = defaultdict(set)
    for module, names in names_by_module.items():
        for name in names:
            if name.endswith("*"):
                graph[module] |= {other for other in names_by_module if other.startswith(name[:-1])}
            while "." in name and name not in names_by_module:
                name = name.rpartition(".")[0]
            graph[module] |= {name} & names_by_module.keys()
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
    front = ast.walk(TREES[SOURCE / "actmem" / "__init__.py"])
    typed = {alias.name for node in front if isinstance(node, ast.ImportFrom) for alias in node.names}
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


def test_prediction_and_show_work_with_neither_torch_nor_numpy():
    names = [module_of(path) for path in TREES if part_of(path) in {"actmem", "actmem_course"} | SCREEN | PREDICTION]
    names.append("actmem.layers.transformer")  # and this one is refused
    done = subprocess.run([sys.executable, "-c", REFUSE, *names], capture_output=True, text=True)
    assert done.stdout.split() == names[:-1] and len(names) > 50
    assert done.returncode == 1 and "No module named" in done.stderr.splitlines()[-1]


def private_names_of_ours(tree):
    """Names with a leading underscore that a file takes from another module of ours: imported, or read as ``module._name``."""
    found, modules = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("actmem"):
            modules.update(alias.asname or alias.name for alias in node.names)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                found.add(f"{node.value.id}.{node.attr}")
    return found


def private_names_of_torch(tree):
    """Imported, below ``torch`` or ``dist``, or of a tensor or storage."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if node.attr == "_cdata" or node.attr in UNDOCUMENTED:
                found.add(node.attr)
        for name in names:
            root, *rest = name.split(".")
            private = [part for part in rest if part.startswith("_") and not part.endswith("__")]
            private += UNDOCUMENTED.intersection(rest)
            if root in ("torch", "dist", "functional") and private:
                found.add(name)
    return found


@pytest.mark.parametrize(
    ("source", "ours", "torchs"),
    [
        ("from actmem.parallel.rng import Mask, _Drop\nMask._mask", {"actmem.parallel.rng._Drop", "Mask._mask"}, set()),
        ("from actmem import recompute as r\nx = r._Region._run_again", {"r._Region"}, set()),
        ("from actmem import keep\nfrom torch import nn\nkeep.__doc__, self._x, torch.__version__", set(), set()),
        ("from torch.utils._pytree import tree_leaves\nimport torch._C", set(), {"torch.utils._pytree.tree_leaves", "torch._C"}),
        ("from torch.multiprocessing.reductions import StorageWeakRef", set(), {"torch.multiprocessing.reductions.StorageWeakRef"}),
        ("torch.ops._c10d\ndist._get_default_group()", set(), {"torch.ops._c10d", "dist._get_default_group"}),
        ("x.untyped_storage()._cdata\nself.fwd_cache[0]", set(), {"_cdata", "fwd_cache"}),
    ],
)  # fmt: skip
def test_private_names_are_seen(source, ours, torchs):
    tree = ast.parse(source)
    assert (private_names_of_ours(tree), private_names_of_torch(tree)) == (ours, torchs)


@pytest.mark.parametrize("path", TREES, ids=module_of)
def test_no_file_reads_anothers_private_names_and_one_reads_torchs(path):
    assert private_names_of_ours(TREES[path]) == set()
    assert bool(private_names_of_torch(TREES[path])) == (path == PRIVATE_FILE)


def test_only_recipes_says_what_a_mode_means():
    """No other file of the library compares the names of modes."""
    names = set(RECOMPUTE_MODES) - {"none"}  # a region has that name too
    for path in (SOURCE / "actmem").rglob("*.py"):
        if path.name != "settings.py":  # Megatron's own words
            compared = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Compare)]
            texts = {part.value for node in compared for part in ast.walk(node) if isinstance(part, ast.Constant)}
            assert not texts & names, path


def public_names(tree):
    """Functions, classes and constants that a file defines at its top level."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def test_one_name_one_room():
    """No two modules share a name, and no two files define the same public one."""
    modules, names = defaultdict(set), defaultdict(set)
    for path in TREES:
        if path.parent not in SOLUTIONS:
            if not path.name.startswith("__"):
                modules[path.stem].add(path)
            for name in public_names(TREES[path]):
                names[name].add(path)
    for folder in {path.parent for path in TREES} - {SOURCE}:
        modules[folder.name].add(folder)
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
    assert {name: paths for name, paths in names.items() if len(paths) > 1 and name not in SHARED} == {}
    assert all(len(names[name]) > 1 for name in SHARED)


def test_readme_says_how_long_the_core_is_that_one_reads_in_one_sitting():
    readme = (SOURCE.parent / "README.md").read_text(encoding="utf-8")
    said, table = re.search(r"about ([\d,]+) lines\. Read them in this order:\n\n(.*?)\n\n", readme, re.DOTALL).groups()
    lines, folder = 0, SOURCE
    for name in re.findall(r"`([\w/]+\.py)`", table):
        path = SOURCE.parent / name if name.startswith("src/") else folder / name
        folder = path.parent
        lines += len(path.read_text(encoding="utf-8").splitlines())
    assert int(said.replace(",", "")) == round(lines, -2) <= 2_000
