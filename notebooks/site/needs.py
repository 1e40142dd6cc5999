"""Which statements of a notebook need a real machine: torch, or processes of their own.

Read from the syntax trees of the cells and of the package, so that no list has to be kept: a
module needs a machine if it imports torch, numpy or subprocess, or a module that does; a
statement needs one if it uses a name that came from such a module, or from such a statement.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
#: What a Python inside a browser does not have.
MACHINE = {"torch", "numpy", "subprocess", "multiprocessing"}
#: Calls that change what they are called on: ``lines.append(measured)`` makes ``lines`` measured.
CHANGES = {"append", "extend", "insert", "add", "add_rows", "update", "setdefault"}


@cache
def needs_machine(module: str, missing: frozenset[str] = frozenset()) -> bool:
    """Whether importing a module, by its full name, ends at one of MACHINE, or at a package that is ``missing``."""
    waiting, seen = [module], set()
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        if parts[0] in MACHINE | missing:
            return True
        if parts[0] not in ("actmem", "actmem_more", "actmem_tools", "actmem_course") or name in seen:
            continue
        seen.add(name)
        waiting.append(".".join(parts[:-1]) or name)  # importing a.b runs a first
        path = SOURCE.joinpath(*parts)
        if path.is_dir():
            waiting += _imported(path / "__init__.py", at_load_only=True)
        elif path.with_suffix(".py").is_file():
            waiting += _imported(path.with_suffix(".py"))
        elif (path.parent / "__init__.py").is_file():  # a name that a package may load when it is asked for
            waiting += _imported(path.parent / "__init__.py", name=parts[-1])
    return False


@cache
def _imported(path: Path, at_load_only: bool = False, name: str = "") -> tuple[str, ...]:
    """Full names of all that a file of the package imports, also inside functions; of one ``name`` where it is given."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    found = []
    while waiting:
        node = waiting.pop()
        found += [full for alias, full in _aliases(node) if name in ("", alias.asname or alias.name)]
        if not ((_for_types_alone(node) and not name) or (at_load_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))):
            waiting += ast.iter_child_nodes(node)
    return tuple(found)


def _for_types_alone(node: ast.AST) -> bool:
    """Whether the imports in there are for type checkers and never run."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not node.orelse


def _aliases(node: ast.AST) -> Iterator[tuple[ast.alias, str]]:
    """Each alias of an import statement with the full name of what it imports."""
    if isinstance(node, ast.Import):
        yield from ((alias, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            raise NotImplementedError(f"a relative import of {node.module}: write it out in full")
        yield from ((alias, f"{node.module}.{alias.name}") for alias in node.names)


@dataclass
class Statement:
    """One statement on the top level of a cell.

    uses, binds: names that it reads, and that it sets or changes.  measured: it needs a machine.
    """

    node: ast.stmt
    text: str
    uses: set[str]
    binds: set[str]
    measured: bool

    @property
    def only_defines(self) -> bool:
        """An import or a definition: without it, nothing is missing until its name is used."""
        return isinstance(self.node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))

    @property
    def always_binds(self) -> bool:
        """Whether its names have new values after it, whatever they were before; not so inside an ``if``."""
        return self.only_defines or isinstance(self.node, (ast.Assign, ast.AnnAssign))


@dataclass
class Reader:
    """Reads the cells of a notebook from the first to the last, as a kernel would."""

    measured: set[str] = field(default_factory=set)
    #: Imported modules by the names that a chapter has for them: ``am.record`` may need what ``am.layer_rows`` does not.
    modules: dict[str, str] = field(default_factory=dict)

    def read(self, source: str) -> list[Statement]:
        """The statements of the next cell.  Imports are taken apart into one name each."""
        return [self._judge(node, source) for top in ast.parse(source).body for node in _apart(top)]

    def _judge(self, node: ast.stmt, source: str) -> Statement:
        uses, binds = _names(node)
        imports = [name for part in ast.walk(node) for _, name in _aliases(part)]
        if isinstance(node, ast.Import):
            self.modules |= {alias.asname: full for alias, full in _aliases(node) if alias.asname}
        members = [
            f"{self.modules[part.value.id]}.{part.attr}"
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in self.modules
        ]
        measured = bool(uses & self.measured) or any(map(needs_machine, imports + members))
        self.measured = self.measured | binds if measured else self.measured - binds
        text = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ast.get_source_segment(source, node) or ""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.decorator_list:
            text = "\n".join(f"@{ast.unparse(one)}" for one in node.decorator_list) + f"\n{text}"
        return Statement(node, text, uses, binds, measured)


def _apart(node: ast.stmt) -> Iterator[ast.stmt]:
    """``from x import a, b`` as two statements, which may differ in what they need."""
    if isinstance(node, ast.Import):
        yield from (ast.Import([alias]) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
    else:
        yield node


#: Names that these set stay inside them.
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _names(node: ast.AST, inside: bool = False) -> tuple[set[str], set[str]]:
    """Names that a statement reads, those of inner scopes included, and names that it sets or changes."""
    uses: set[str] = set()
    binds: set[str] = set()
    if isinstance(node, ast.Name):
        (uses if isinstance(node.ctx, ast.Load) else binds).add(node.id)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        binds.add(node.name)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        binds |= _root(node.func.value)
    elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        binds |= _root(node.value)
    binds |= {alias.asname or alias.name.partition(".")[0] for alias, _ in _aliases(node)}
    own = set() if inside else binds
    for child in ast.iter_child_nodes(node):
        more_uses, more_binds = _names(child, inside or isinstance(node, _SCOPES))
        uses |= more_uses
        own |= more_binds
    return uses, own


def _root(node: ast.expr) -> set[str]:
    """``x`` of ``x.y[z]``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()
