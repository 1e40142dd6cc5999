"""Edits of our own answer that its syntax gives.

A mistake is what such an edit does.  The families below drop, move, repeat and exchange what is done to a value, one after
the other, and change the arithmetic; their sentences name functions and weights, and where these belong.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, permutations, product
from typing import Any

from actmem_course.judge.exchanged import OPERATOR_VARIANTS, OPERATORS


@dataclass(frozen=True)
class Wrapper:
    """One thing that is done to a value.  around: the expression with it; name: what a learner calls it; kind: in all places."""

    name: str
    kind: str
    around: Callable[[ast.expr], ast.expr]


class Families:
    """The edits that the syntax of one of our functions gives.

    places: where a function's or weight's name belongs, in words.
    """

    def __init__(self, source: str, function: str, places: Mapping[str, str]):
        self.source, self.places = source, {**{o.name: o.place for o in OPERATORS}, **places}
        module = ast.parse(source).body
        self.functions = {node.name: node for node in module if isinstance(node, ast.FunctionDef)}
        self.function = self.functions[function]
        #: Names that a learner's file has as well.
        self.given = {argument.arg for argument in self.function.args.args}
        #: The function, and the autograd Functions that it applies.
        self.edited: list[ast.stmt] = [self.function]
        self.instead = list(self._siblings())
        self._inline_calls(function)
        used = _names_of(self.function, ast.Load)
        self.edited += [node for node in module if isinstance(node, ast.ClassDef) and node.name in used]
        for node in ast.walk(ast.Module(self.edited, [])):
            if isinstance(node, ast.FunctionDef):
                _inline_names(node.body)

    def all(self) -> Iterator[tuple[str, str]]:
        """The mistake in words, and our module with it; the likelier first."""
        seen: set[str] = set()
        for words, source in self._all():
            if source not in seen:
                seen.add(source)
                yield words, source

    def _all(self) -> Iterator[tuple[str, str]]:
        yield from self.instead
        yield from self._statements()
        spines = []
        for node in ast.walk(self.function):
            if isinstance(node, (ast.Assign, ast.Return)) and isinstance(node.value, ast.expr):
                wrappers, leaf = _spine(node.value)
                if wrappers:
                    spines.append((node, wrappers, leaf))
        kinds = dict.fromkeys(w.kind for _, wrappers, _ in spines for w in wrappers)
        families = [kind for kind in kinds if sum(w.kind == kind for _, ws, _ in spines for w in ws) > 1]
        for change, words in ((lambda w: [], "is missing"), (lambda w: [w, w], "comes twice")):
            yield from self._each(spines, change, words)
            for kind in families:
                new = [
                    (n, [x for w in ws for x in (change(w) if w.kind == kind else [w])], leaf) for n, ws, leaf in spines
                ]
                yield self._edited(f"{kind} {words}, in all places{self._belongs(kind)}", new)
        for node, wrappers, leaf in spines:
            yield from self._moves(node, wrappers, leaf)
        yield from self._operators()
        yield from self._names()
        yield from self._detached()
        for node, wrappers, leaf in spines:
            for which, operator in enumerate(OPERATORS if any(w.kind in OPERATOR_VARIANTS for w in wrappers) else ()):
                called = ast.parse(f"instead({operator.name!r}, {which})", mode="eval").body
                given = ast.Name("group", ast.Load())
                put = Wrapper("", "", lambda x, called=called: ast.Call(called, [x, given], []))  # type: ignore[misc]  # noqa: B023
                for place in range(len(wrappers) + 1):
                    where = f"after {wrappers[place].name}" if place < len(wrappers) else f"before {wrappers[-1].name}"
                    words = f"{operator.name} is called {where}, where there is nothing to exchange"
                    yield self._edited(words, [(node, [*wrappers[:place], put, *wrappers[place:]], leaf)])
        yield from self._arithmetic()

    def _siblings(self) -> Iterator[tuple[str, str]]:
        """A function of the file in place of another that takes the same arguments."""
        for call in [node for node in ast.walk(self.function) if isinstance(node, ast.Call)]:
            called = self.functions.get(_name(call.func), self.function)
            for name, other in self.functions.items() if called is not self.function else ():
                alike = len(other.args.args) > 2 and ast.dump(other.args) == ast.dump(called.args)
                if alike and other not in (called, self.function):
                    changed = self._source_with([(call, "func", ast.Name(name, ast.Load()))])
                    yield f"{name} is called where {called.name} belongs", changed

    def _detached(self) -> Iterator[tuple[str, str]]:
        """A value that goes on without its graph."""
        body = list(ast.walk(ast.Module(self.function.body, [])))
        called = [node.func for node in body if isinstance(node, ast.Call)]
        for node in body:
            name = _name(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
            if name and node not in called and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                who = f"what {name} returns" if isinstance(node, ast.Call) else name
                detached = ast.Call(ast.Attribute(node, "detach", ast.Load()), [], [])  # type: ignore[arg-type]
                yield f"{who} is detached, so no gradient goes back through it", self._exchanged(node, detached)  # type: ignore[arg-type]

    def _arithmetic(self):
        """A term or factor left out or turned round, another comparison, number or function, arguments swapped."""
        for function in ast.walk(ast.Module(self.edited, [])):
            if isinstance(function, ast.FunctionDef):
                when = f"in {function.name}, " * (function is not self.function)
                known, ours = _known(function), {*_names_of(function, ast.Store)} - self.given
                for node in [node for node in ast.walk(ast.Module(function.body, [])) if isinstance(node, ast.expr)]:
                    for words, new in _otherwise(node):
                        pieces = [_said(piece, known) for piece in words[1::2]]
                        words[1::2] = [f"“{piece}”" for piece in pieces]
                        local = any(ours.intersection(re.findall(r"(?<!\.)\b\w+", piece)) for piece in pieces)
                        if max(map(len, words)) <= _LONGEST:
                            yield when + "".join(words) + _OUR_NAMES * local, self._exchanged(node, new)

    def other_names(self) -> Iterator[tuple[str, str]]:
        """One name in place of another, in autograd Functions: two numbers may be the same by chance, two tensors are not."""
        applied = ast.walk(ast.Module(self.edited[1:], []))
        for function in [node for node in applied if isinstance(node, ast.FunctionDef)]:
            local = dict.fromkeys([*_names_of(function, ast.Store), *(a.arg for a in function.args.args)])
            # Whose dtype or shape is read may be right for both.
            asked = [
                n.value for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr in ("dtype", "shape")
            ]
            names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
            read = [node for node in names if node not in asked]
            for node, name in product(read, [name for name in local if name not in ("ctx", "group")]):
                if node.id in local and name != node.id:
                    ours = _OUR_NAMES * (not {name, node.id} <= self.given)
                    words = f"in {function.name}, “{name}” stands where “{node.id}” belongs{ours}"
                    yield words, self._exchanged(node, ast.Name(name, ast.Load()))

    def _exchanged(self, old: ast.expr, new: ast.expr) -> str:
        """Our module with one expression in place of another."""
        for node in self.edited:
            _Exchange(old, new).visit(node)
        source = self._source_with([])
        for node in self.edited:
            _Exchange(new, old).visit(node)
        return source

    def _statements(self):
        """A statement that calls something, or decides, is left out, comes twice, or elsewhere."""
        body = self.function.body
        steps = {node: name for node in body if (name := _statement(node))}
        changes = [
            (f"{name} {words}{self._belongs(name)}", [s for s in body for _ in range(times if s is node else 1)])
            for words, times in (("is missing", 0), ("comes twice", 2))
            for node, name in steps.items()
        ]
        for node, name in steps.items():
            rest = [other for other in body if other is not node]
            for place, other in enumerate(rest):
                if other in steps and place != body.index(node):
                    words = f"{name} comes before {steps[other]}{self._belongs(name)}"
                    changes.append((words, [*rest[:place], node, *rest[place:]]))
        for words, changed in changes:
            yield words, self._source_with([(self.function, "body", changed)])

    def _each(self, spines, change, words):
        for node, wrappers, leaf in spines:
            for i, w in enumerate(wrappers):
                new = [*wrappers[:i], *change(w), *wrappers[i + 1 :]]
                yield self._edited(f"{w.name} {words}{self._belongs(w.kind, w.name)}", [(node, new, leaf)])

    def _moves(self, node, wrappers, leaf):
        """One thing earlier or later.  wrappers: the last that is done comes first."""
        for i, w in enumerate(wrappers):
            rest = wrappers[:i] + wrappers[i + 1 :]
            for to in sorted((k for k in range(len(wrappers)) if k != i), key=lambda k: abs(k - i)):
                where = f"before {rest[to - 1].name}" if to > i else f"after {rest[to].name}"
                words = f"{w.name} comes {where}{self._belongs(w.kind, w.name)}"
                yield self._edited(words, [(node, [*rest[:to], w, *rest[to:]], leaf)])

    def _operators(self):
        """Another operator in the place of one, or one with another pass; in one place, and in all."""
        calls = [n for n in ast.walk(self.function) if isinstance(n, ast.Call) and _name(n.func) in OPERATOR_VARIANTS]
        for name in dict.fromkeys(_name(call.func) for call in calls):
            mine = [call for call in calls if _name(call.func) == name]
            for which, (words, _) in enumerate(OPERATOR_VARIANTS[name]):
                instead = ast.parse(f"instead({name!r}, {which})", mode="eval").body
                for places in [[call] for call in mine] + [mine] * (len(mine) > 1):
                    source = self._source_with([(call, "func", instead) for call in places])
                    yield ("every " * (len(places) > 1)) + words, source

    def _names(self):
        """A weight or a value where another of the same kind belongs, and two of them swapped."""
        nodes: dict[str, list[ast.expr]] = {}
        parameters = {arg.arg for arg in self.function.args.args}
        for node in ast.walk(self.function):
            if isinstance(node, ast.Attribute) and _name(node.value) in parameters or _name(node) in parameters:
                nodes.setdefault(_name(node).rpartition(".")[2], []).append(node)  # type: ignore[arg-type]
        for one, other in permutations(nodes, 2):
            if type(nodes[one][0]) is not type(nodes[other][0]) or one.rpartition("_")[2] != other.rpartition("_")[2]:
                continue
            yield f"{other} is also used where {one} belongs", self._renamed(nodes, {one: other})
            if one < other:
                yield f"{one} and {other} are swapped", self._renamed(nodes, {one: other, other: one})
        for name, (place, *others) in nodes.items():
            if name.endswith("bias") and "group" in parameters and not others:
                part = ast.parse(f"{ast.unparse(place)} / dist.get_world_size(group)", mode="eval").body
                yield f"{name} is divided by t; add the whole of it{self._belongs(name)}", self._exchanged(place, part)

    def _renamed(self, nodes, names):
        field = {ast.Attribute: "attr", ast.Name: "id"}
        return self._source_with(
            [(node, field[type(node)], new) for name, new in names.items() for node in nodes[name]]
        )

    def _belongs(self, *names: str) -> str:
        place = next((self.places[name] for name in names if name in self.places), "")
        return f": it belongs {place}" if place else ""

    def _edited(self, words, spines):
        made = [(n, "value", reduce(lambda x, w: w.around(x), reversed(ws), leaf)) for n, ws, leaf in spines]
        return words, self._source_with(made)

    def _source_with(self, changes: Sequence[tuple[ast.AST, str, Any]]) -> str:
        """Our module with the function changed: in each a node, a field of it, and what that is for once."""
        before = [(node, field, getattr(node, field)) for node, field, _ in changes]
        for node, field, value in changes:
            setattr(node, field, value)
        edited = "\n\n\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in self.edited)
        for node, field, value in before:
            setattr(node, field, value)
        return f"{self.source}\n\n{edited}\n"

    def _inline_calls(self, function: str) -> None:
        """The functions of one line that ours calls, in place of their calls; not the operators."""
        others = {
            name: node for name, node in self.functions.items() if name != function and name not in OPERATOR_VARIANTS
        }
        short = {k: node for k, node in others.items() if isinstance(_body(node)[0], ast.Return)}
        short = {k: node for k, node in short.items() if "apply" not in ast.unparse(node)}

        class Inline(ast.NodeTransformer):
            def visit_Call(self, node):
                self.generic_visit(node)
                called = short.get(_name(node.func))
                if called is None or any(isinstance(arg, ast.Starred) for arg in node.args):
                    return node
                given = dict(zip((arg.arg for arg in called.args.args), node.args))
                return _Put(given).visit(copy.deepcopy(_body(called)[0].value))  # type: ignore[attr-defined]

        Inline().visit(self.function)


#: After a piece of ours with names that a learner's file need not have.
_OUR_NAMES = " (with the names of our solution)"
#: A sentence quotes no longer piece of ours.
_LONGEST = 70
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_ANOTHER = {
    "min": ("max",), "max": ("min",), "sum": ("mean",), "mean": ("sum",), "silu": ("gelu", "relu", "sigmoid"),
    "gelu": ("F.silu", "F.relu"), "scatter_add_": ("scatter_",), "rsqrt": ("sqrt", "reciprocal"),
}  # fmt: skip
#: By operator: the words about what is left out, and the operator that stands there by mistake.
_ARITHMETIC: dict[type[ast.operator], tuple[str, str, type[ast.operator]]] = {
    ast.Mult: ("the factor ", " is missing beside ", ast.Div),
    ast.Div: ("", "", ast.Mult),
    ast.FloorDiv: ("", "", ast.Mult),
    ast.Add: ("", " is not added to ", ast.Sub),
    ast.Sub: ("", " is not subtracted from ", ast.Add),
}


def _otherwise(node: ast.expr) -> Iterator[tuple[list, ast.expr]]:
    """What may stand for an expression by mistake: the sentence, whose every second piece is code, and the code."""
    changed: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        before, between, turned = _ARITHMETIC[type(node.op)]
        pairs = [(node.left, node.right), (node.right, node.left)]
        for one, other in pairs if isinstance(node.op, (ast.Mult, ast.Add)) else pairs[:1]:
            times = isinstance(node.op, ast.Mult)
            if not times and isinstance(other, ast.Constant):
                changed.append(one)
            elif not isinstance(other, ast.Constant):  # what a sum counts is told by its terms
                by = isinstance(node.op, (ast.Div, ast.FloorDiv))
                yield ["", one, " is not divided by ", other] if by else [before, other, between, one], one
                if times:
                    yield ["the factor ", other, " comes twice"], _with(node, left=node, right=other)
        if not isinstance(node.op, (ast.Mult, ast.Add)):
            changed += [_with(node, left=node.right, right=node.left), node.right]
        if isinstance(node.op, ast.Div):
            changed.append(_with(node, left=ast.Constant(1)))
        changed.append(_with(node, op=turned()))
        for field, number in ast.iter_fields(node) if isinstance(node.op, (ast.Add, ast.Sub)) else ():
            if isinstance(number, ast.Constant) and isinstance(number.value, int):
                changed += [_with(node, **{field: ast.Constant(number.value + step)}) for step in (-1, 1)]
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed += [_with(node, ops=[op()])] if (op := _COMPARED.get(type(node.ops[0]))) else []
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
        changed += [_with(node, slice=ast.Constant(i)) for i in range(3) if i != node.slice.value]
    elif isinstance(node, ast.IfExp):
        for one, other, holds in ((node.body, node.orelse, "does not hold"), (node.orelse, node.body, "holds")):
            yield ["", one, " also stands where ", node.test, f" {holds}; there ", other, " belongs"], one
    elif isinstance(node, ast.Call):
        field = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node.func), "")
        for name in _ANOTHER.get(getattr(node.func, field, ""), ()):
            another = _with(node.func, **{field: name})
            yield ["", another, " is called where ", node.func, " belongs"], _with(node, func=another)
        if _name(node.func) in ("torch.autograd.grad", "torch.autograd.backward"):
            ones = ast.Call(ast.parse("torch.ones_like", mode="eval").body, node.args[:1], [])
            words = ["the incoming gradient is left out: hand it to ", node.func, ""]
            yield words, _with(node, args=[*node.args[:-1], ones])
        if _name(node.func) == "dist.get_world_size":  # right on two ranks
            changed.append(ast.Constant(2))
        if isinstance(node.func, ast.Attribute) and len(node.args) == len(node.keywords):
            # Over all dimensions in place of one; or as if it were not called, where it has no argument.
            changed.append(_with(node, args=[], keywords=[]) if node.args else node.func.value)
        changed += [_with(node, keywords=[k for k in node.keywords if k is not left]) for left in node.keywords]
        if _name(node.func) in ("min", "max"):
            changed += node.args
        elif not _name(node.func).endswith(".apply"):
            changed += [_with(node, args=args) for args in _swapped(node.args)]
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        changed += [_with(node, elts=elements) for elements in _swapped(node.elts)]
    for new in changed:
        yield ["", new, " stands where ", node, " belongs"], new


def _swapped(items: list) -> Iterator[list]:
    """With each two of them in the other's place."""
    for one, other in combinations(range(len(items)), 2):
        yield [items[{one: other, other: one}.get(i, i)] for i in range(len(items))]


def _with(node: ast.AST, **fields: Any) -> Any:
    """A copy with other fields."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _said(piece: ast.expr, known: Mapping[str, ast.expr]) -> str:
    """A piece of ours, without its local names if it is short."""
    long = ast.unparse(_Put(known).visit(copy.deepcopy(piece)))
    return long if len(long) <= _LONGEST // 2 else ast.unparse(piece)


def _known(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """What local names stand for that get their value once; a letter for an argument stays a letter."""
    stored = [*_names_of(function, ast.Store), *(argument.arg for argument in function.args.args)]
    given = {_name(node.targets[0]): node.value for node in ast.walk(function) if isinstance(node, ast.Assign)}
    return {name: value for name, value in given.items() if stored.count(name) == 1 and not isinstance(value, ast.Name)}


class _Exchange(ast.NodeTransformer):
    """One expression in place of another."""

    def __init__(self, old: ast.expr, new: ast.expr):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


class _Put(ast.NodeTransformer):
    """Expressions in place of names."""

    def __init__(self, given: Mapping[str, ast.expr]):
        self.given = given

    def visit_Name(self, node):
        read = isinstance(node.ctx, ast.Load) and node.id in self.given
        return copy.deepcopy(self.given[node.id]) if read else node


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) else function.body


def _names_of(node: ast.AST, use: type[ast.expr_context]) -> list[str]:
    """The names that a piece of code reads (ast.Load) or writes (ast.Store), each as often as it does."""
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, use)]


def _inline_names(body: list[ast.stmt]) -> None:
    """A name that is used once, in the place of its use."""
    i = 0
    while i < len(body):
        node = body[i]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1:
            name, uses = node.targets[0].id, []
            for later in body[i + 1 :]:
                uses += [later] * _names_of(later, ast.Load).count(name)
                if name in _names_of(later, ast.Store):
                    break
            between = body[i + 1 : body.index(uses[0])] if uses else []
            stored = {other for statement in between for other in _names_of(statement, ast.Store)}
            unchanged = stored.isdisjoint(_names_of(node.value, ast.Load))
            if len(uses) == 1 and unchanged and isinstance(uses[0], (ast.Assign, ast.Return)):
                _Put({name: node.value}).visit(uses[0])
                del body[i]
                continue
        i += 1


def _spine(node: ast.expr) -> tuple[list[Wrapper], ast.expr]:
    """What is done to a value, the last first, and the value."""
    found: list[Wrapper] = []
    while True:
        if isinstance(node, ast.Call) and node.args:
            func, first = _name(node.func), node.args[0]
            if func in ("min", "max"):
                return found, node
            if func.endswith("linear") and len(node.args) > 2 and _name(node.args[2]).endswith("bias"):
                bias, nothing = node.args[2], ast.BinOp(ast.Constant(0), ast.Mult(), node.args[2])
                name = _name(bias).rpartition(".")[2]
                found.append(Wrapper(name, "the bias", lambda x, b=bias: ast.BinOp(x, ast.Add(), b)))  # type: ignore[misc]
                node = ast.Call(node.func, [*node.args[:2], nothing, *node.args[3:]], node.keywords)
            weight = next((_name(a).rpartition(".")[2] for a in node.args[1:] if _name(a).endswith("weight")), "")
            name = f"the product with {weight}" if func.endswith("linear") and weight else func.rpartition(".")[2]
            kind = "the product" if func.endswith("linear") else name
            if func.endswith(".apply"):
                return found, node
            if isinstance(first, ast.Starred):
                if not isinstance(first.value, ast.Call):
                    return found, node

                def around(x, outer=node, inner=first.value):
                    given = ast.Call(inner.func, [x, *inner.args[1:]], inner.keywords)
                    return ast.Call(outer.func, [ast.Starred(given, ast.Load()), *outer.args[1:]], outer.keywords)

                found.append(Wrapper(name, kind, around))
                node = first.value.args[0]
            else:
                if func.startswith("dropouts."):
                    name = kind = func
                if weight and kind == name:
                    name = f"{name} with {weight}"
                found.append(Wrapper(name, kind, lambda x, n=node: ast.Call(n.func, [x, *n.args[1:]], n.keywords)))  # type: ignore[misc]
                node = first
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left = len(list(ast.walk(node.left))) > len(list(ast.walk(node.right)))
            term = node.right if left else node.left
            other = _name(term).rpartition(".")[2]
            added = other or (f"“{said}”" if len(said := ast.unparse(term)) <= _LONGEST else "the other term")
            name, kind = (other, "the bias") if other.endswith("bias") else (f"the addition of {added}",) * 2
            side = "left" if left else "right"
            found.append(Wrapper(name, kind, lambda x, n=node, s=side: _with(n, **{s: x})))  # type: ignore[misc]
            node = node.left if left else node.right
        else:
            return found, node


def _statement(node: ast.stmt) -> str:
    """What a learner calls a statement: the function that it calls, or its condition; "" for any other."""
    if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call):
        name = _name(node.value.func)
        return f"{name}()" if "." in name else name
    return f"“if {ast.unparse(node.test)}”" if isinstance(node, ast.If) else ""


def _name(node: ast.AST) -> str:
    """A name, or a chain of attributes; "" for everything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}" if _name(node.value) else ""
    return ""
