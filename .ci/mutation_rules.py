"""Ways to break a line of Python that still runs: each rule finds its places by itself.

A site is one expression or statement and the text to put in its place.  What only names, explains or
draws something is left alone: docstrings, annotations, error messages, text.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Functions whose result may be replaced by their first argument.
COLLECTIVES = {"all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "f", "f_bar", "g", "g_bar"}
#: Methods whose result may be replaced by the object that they were called on.
STEPS = {"drop", "triu_", "masked_fill_", "clamp_", "sub_", "exp_", "div_", "mul_", "mul", "log", "transpose", "expand"}
#: Names that mean two sides of one thing.
TWINS = [
    ("f", "f_bar"),
    ("g", "g_bar"),
    ("replicated", "sharded"),
    ("is_first", "is_last"),
    ("min", "max"),
    ("any", "all"),
    ("forward_time", "backward_time"),
    ("start_all_gather", "start_all_reduce"),
    ("needs_x", "needs_weight"),
    ("low", "high"),
]
DTYPES = [("float32", "float64"), ("int32", "int64"), ("bool", "uint8")]
ORDER = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Site:
    """One place in one file, and what takes its place there.  start, end: bytes of the file."""

    path: str
    rule: str
    owner: str
    before: str
    after: str
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.path}: {self.owner}: {self.rule}: {self.before} → {self.after}"

    def applied(self, source: bytes) -> bytes:
        """The source with this one change."""
        return source[: self.start] + self.after.encode() + source[self.end :]


Rule = Callable[[ast.AST], Iterator[ast.AST]]


def dropped_collective(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and _called(node) in COLLECTIVES and node.args:
        yield node.args[0]


def swapped_twins(node: ast.AST) -> Iterator[ast.AST]:
    yield from _renamed(node, TWINS)


def other_dtype(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        yield from _renamed(node, DTYPES)


def flipped_sign(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Add, ast.Sub)) and not _is_text(node):
        yield _with(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand


def dropped_term(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and not _is_text(node):
        yield node.left


def dropped_factor(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and not _is_text(node):
        yield node.left


def dropped_divisor(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div, ast.Mod)) and not _is_text(node):
        yield node.left


def off_by_one(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)


def moved_boundary(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        yield _with(node, ops=[ORDER[type(node.ops[0])](), *node.ops[1:]])


def turned_condition(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())


def one_branch(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If):
        yield ast.Constant(False)  # in place of its condition


def skipped_step(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STEPS:
        if getattr(node.func.value, "id", "") == "torch":
            return
        yield node.args[-1] if node.func.attr == "drop" else node.func.value


def dropped_statement(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "__init__" not in ast.unparse(node):
        yield ast.Pass()


#: Every rule, and how many sites of it are tried.
RULES: dict[str, tuple[Rule, int]] = {
    "collective dropped": (dropped_collective, 8),
    "twins swapped": (swapped_twins, 8),
    "other dtype": (other_dtype, 4),
    "sign flipped": (flipped_sign, 8),
    "term dropped": (dropped_term, 7),
    "factor dropped": (dropped_factor, 5),
    "divisor dropped": (dropped_divisor, 6),
    "off by one": (off_by_one, 8),
    "boundary moved": (moved_boundary, 7),
    "condition turned": (turned_condition, 6),
    "branch never taken": (one_branch, 4),
    "step skipped": (skipped_step, 5),
    "call dropped": (dropped_statement, 4),
}

#: Tried whatever the seed is, one site each: path, function, rule.
ALWAYS = (
    ("parallel/conjugates.py", "_GBar.backward", "collective dropped"),
    ("parallel/linear.py", "reduce_partial_gradients", "collective dropped"),
    ("parallel/conjugates.py", "f_bar_or_g_bar", "twins swapped"),
    ("parallel/rng.py", "DropoutStreams.__init__", "twins swapped"),
    ("layers/attention.py", "CoreAttention.forward", "step skipped"),
    ("layers/attention.py", "causal_mask", "step skipped"),
    ("formulas/schedule.py", "interleaved", "off by one"),
    ("formulas/schedule.py", "one_forward_one_backward", "off by one"),
    ("formulas/activations.py", "layer_rows", "divisor dropped"),
    ("parallel/vocab.py", "_Lookup.backward", "step skipped"),
)


def sites_of(path: str, source: bytes) -> Iterator[Site]:
    """Every site in a file, all rules."""
    tree, lines = ast.parse(source), [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    names = _names(tree) | {"min", "max", "any", "all"}
    for node, owner in _working_nodes(tree, ""):
        for name, (rule, _) in RULES.items():
            for new in rule(node):
                if name == "twins swapped" and not names.issuperset(_names(new)):
                    continue  # the other one is not in this file
                place: Any = node.test if isinstance(node, ast.If) else node
                start = lines[place.lineno - 1] + place.col_offset
                end = lines[place.end_lineno - 1] + place.end_col_offset
                text = ast.unparse(ast.fix_missing_locations(new))
                after = f"({text})" if isinstance(new, ast.expr) else text
                yield Site(path, name, owner, " ".join(source[start:end].decode().split())[:90], after, start, end)


def chosen(sites: list[Site], seed: int) -> list[Site]:
    """As many sites of each rule as RULES says, those of ALWAYS first and then few from one place.

    The order is by a number made of each site's own text: a change elsewhere leaves the choice as it is.
    """
    sites = sorted(sites, key=lambda site: hashlib.sha256(f"{seed} {site.name}".encode()).digest())
    found: list[Site] = []
    for place in ALWAYS:
        found += [site for site in sites if (site.path, site.owner, site.rule) == place][:1]
    for name, (_, count) in RULES.items():
        left = [site for site in sites if site.rule == name and site not in found]
        for _ in range(min(count - sum(site.rule == name for site in found), len(left))):
            taken = [(site.path, site.owner) for site in found]
            best = min(left, key=lambda s: (taken.count((s.path, s.owner)), sum(path == s.path for path, _ in taken)))
            left.remove(best)
            found.append(best)
    return found


def package_sites(package: Path) -> list[Site]:
    """All sites of a package, by paths below it."""
    files = sorted(package.rglob("*.py"))
    return [site for file in files for site in sites_of(str(file.relative_to(package)), file.read_bytes())]


def _working_nodes(node: ast.AST, owner: str) -> Iterator[tuple[ast.AST, str]]:
    """The nodes below that compute something, each with the function or class around it."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "names", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Assert)):
                continue
            inside = owner
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{owner}.{child.name}".lstrip(".")
            elif hasattr(child, "lineno") and owner:  # module level: tables, which have tests of their own
                yield child, owner
            if not isinstance(child, ast.Raise):
                yield from _working_nodes(child, inside)


def _called(node: ast.Call) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def _renamed(node: ast.AST, pairs: list[tuple[str, str]]) -> Iterator[ast.AST]:
    for one, other in [*pairs, *((b, a) for a, b in pairs)]:
        if isinstance(node, ast.Name) and node.id == one and isinstance(node.ctx, ast.Load):
            yield ast.Name(other, ast.Load())
        if isinstance(node, ast.Attribute) and node.attr == one and isinstance(node.ctx, ast.Load):
            yield _with(node, attr=other)


def _names(tree: ast.AST) -> set[str]:
    """Every name and attribute that is read or imported."""
    found = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
    return found | {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def _is_text(node: ast.AST) -> bool:
    """Whether a sum or product is one of texts or lists."""
    sides = [getattr(node, name) for name in ("left", "right", "value", "target") if hasattr(node, name)]
    return any(
        isinstance(side, (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr))
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        or (isinstance(side, ast.BinOp) and _is_text(side))
        for side in sides
    )


def _with(node: ast.AST, **fields) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
