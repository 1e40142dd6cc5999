"""Every place where a formula makes a number, found in the syntax trees of src/actmem/formulas.

``instrument`` wraps each such place, inside the live functions, in a call to ``Sites.passes``.
While no site is chosen, values pass unchanged and the sites are noted.  A chosen
site changes its value by the smallest step: one byte, FLOP, element or exchange; where the number
is a ratio, a thousandth of it.
"""

from __future__ import annotations

import __future__

import ast
import importlib
import inspect
import pkgutil
import types
from dataclasses import is_dataclass, replace
from fractions import Fraction
from pathlib import Path

import actmem.formulas

#: Kinds of row: what a row is called by, and the numbers in it.
ROWS = {
    "Row": (("term",), ("bytes",)),
    "State": (("term",), ("bytes_per_parameter",)),
    "Product": (("term",), ("flops",)),
    "Exchange": (("kind", "phase", "where"), ("payload_bytes", "count")),
    "Operation": (("name",), ("flops", "bytes")),
    "Rebuild": (("name",), ("bytes", "flops")),
    "RingState": (("phase",), ("sent_bytes",)),
    "Value": (("label",), ("value",)),
    "Utilisation": (("model",), ("mfu_percent", "hfu_eq8_percent", "hfu_text_percent", "hfu_stopped_percent", "full_recompute_mfu_percent")),
}
_PASSES = "__passes__"


class Sites:
    """reached: changes that the values seen so far offer.  chosen: the change to make.  places: all places, by number."""

    def __init__(self):
        self.reached: set[str] = set()
        self.chosen = ""
        self.places: list[str] = []
        self.visited: set[int] = set()
        self._places_of: dict[str, list[int]] = {}

    def passes(self, place: int, value):
        """``value``, or what the chosen change makes of it."""
        self.visited.add(place)
        return self._pass(place, self.places[place], value)

    def _pass(self, place: int, name: str, value):
        if is_dataclass(value):
            return self._pass_row(place, name.partition(":")[0], value)
        if isinstance(value, dict):
            return {key: self._pass(place, f"{name}, {key}", item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._pass(place, name, item) for item in value)
        if isinstance(value, bool) or not isinstance(value, (int, float, Fraction)):
            return value
        return step(value) if self._offer(place, name) else value

    def _pass_row(self, place: int, function: str, row):
        labels, numbers = ROWS[type(row).__name__]
        label = ", ".join(filter(None, (str(getattr(row, name)) for name in labels)))
        for field in numbers:
            if self._offer(place, f"{function}: {label} · {field}"):
                number = getattr(row, field)
                # A printed comparison shows hundredths.
                more = number + Fraction(1, 100) if type(row).__name__ == "Value" and row.unit else step(number)
                row = replace(row, **{field: more})
        return row

    def _offer(self, place: int, name: str) -> bool:
        """Note a change that could be made here; true if it is the chosen one.  Two places with rows of one name are told apart."""
        places = self._places_of.setdefault(name, [])
        if place not in places:
            places.append(place)
        if place != places[0]:
            name += f" ({1 + places.index(place)})"
        self.reached.add(name)
        return name == self.chosen


def step(number):
    """One more; for a ratio, a thousandth more."""
    if isinstance(number, int):
        return number + 1
    return number + (number or type(number)(1)) / 1000


class _Watched(dict):
    """A table of constants whose entries can be changed as formulas' values are."""

    def __init__(self, entries: dict, sites: Sites, name: str):
        super().__init__(entries)
        self.places = {key: _add(sites, f"{name}[{key!r}]") for key in entries}
        self.sites = sites

    def __getitem__(self, key):
        return self.sites.passes(self.places[key], super().__getitem__(key))


class _Wrap(ast.NodeTransformer):
    """Wraps what one function makes: what it returns, what its branches assign, its rows, a table's entries."""

    def __init__(self, sites: Sites, name: str, numeric: bool, helpers: set[str]):
        self.sites, self.name, self.numeric, self.helpers = sites, name, numeric, helpers

    def place(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.IfExp):  # each case is a formula of its own
            return ast.IfExp(node.test, self.place(node.body), self.place(node.orelse))
        number = _add(self.sites, f"{self.name}: {ast.unparse(node)}")
        return ast.Call(ast.Name(_PASSES, ast.Load()), [ast.Constant(number), node], [])

    def visit_Return(self, node):
        whole = self.place(node.value) if self.numeric and node.value is not None else None
        self.generic_visit(node)
        node.value = whole or node.value
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        for statement in [*node.body, *node.orelse]:
            if isinstance(statement, ast.AugAssign) and not isinstance(statement.value, (ast.List, ast.Call)):
                # ``count -= 1`` is a formula although its value is a constant.
                number = _add(self.sites, f"{self.name}: {ast.unparse(statement)}")
                statement.value = ast.Call(ast.Name(_PASSES, ast.Load()), [ast.Constant(number), statement.value], [])
            elif isinstance(statement, ast.Assign) and self.numeric:
                statement.value = self.place(statement.value)
        return node

    def visit_Dict(self, node):
        for index, value in enumerate(node.values):
            if isinstance(value, ast.Lambda):
                value.body = self.place(value.body)
            else:
                node.values[index] = self.place(value)
        return node

    def visit_Call(self, node):
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if called in ROWS or called in self.helpers:
            return self.place(node)
        if called == "format":
            for keyword in node.keywords:
                keyword.value = self.place(keyword.value)
        else:
            self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node):
        return node  # a helper: what it makes passes where it is called


#: What the paper printed, and orders of actions, which tests of their own check.
NOT_FORMULAS = {"paper", "schedule", "timeline", "zero_bubble", "controllable_memory"}


def instrument(sites: Sites) -> None:
    """Wrap every place in formulas.  Call it before anything imports its tables of constants."""
    for found in pkgutil.iter_modules(actmem.formulas.__path__):
        if found.name in NOT_FORMULAS:
            continue
        module = importlib.import_module(f"actmem.formulas.{found.name}")
        module.__dict__[_PASSES] = sites.passes
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                _wrap(sites, module, found.name, node, module.__dict__[node.name])
            elif isinstance(node, ast.ClassDef):
                for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
                    living = module.__dict__[node.name].__dict__[method.name]
                    _wrap(sites, module, f"{found.name}.{node.name}", method, getattr(living, "fget", living))
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
                name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
                if all(isinstance(entry, int) or _is_states(entry) for entry in module.__dict__[name].values()):
                    module.__dict__[name] = _Watched(module.__dict__[name], sites, f"{found.name}.{name}")


def _wrap(sites: Sites, module: types.ModuleType, where: str, node: ast.FunctionDef, living: types.FunctionType) -> None:
    if node.name.startswith("check_"):  # returns what it was given
        return
    returns = ast.unparse(node.returns) if node.returns else ""
    numeric = any(kind in returns for kind in ("int", "float", "Fraction")) and "tuple" not in returns
    helpers = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    wrap = _Wrap(sites, f"{where}.{node.name}", numeric, helpers)
    node.body = [wrap.visit(statement) for statement in node.body]
    flags = __future__.annotations.compiler_flag
    code = compile(ast.fix_missing_locations(ast.Module([node], [])), module.__file__, "exec", flags=flags, dont_inherit=True)
    # Under ``checked`` lies the function as it was written.
    inspect.unwrap(living).__code__ = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _is_states(entry: object) -> bool:
    return isinstance(entry, tuple) and all(type(part).__name__ == "State" for part in entry)


def _add(sites: Sites, name: str) -> int:
    sites.places.append(name)
    return len(sites.places) - 1
