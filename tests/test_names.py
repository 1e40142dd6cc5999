"""One name, one room: no two modules share a name, and no two files define the same public one."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
FILES = sorted(SOURCE.rglob("*.py"))
JUDGE = SOURCE / "actmem_course" / "judge"
#: Solutions and cases are called as what they solve and judge, and labs teach names that the library has.
SOLUTIONS = (JUDGE / "solutions", JUDGE / "cases")

#: Names that several files may define, and why.
SHARED = {
    "main": "a command's entry point is called that",
    "FUNCTIONS": "tools find a file's autograd functions under this name",
}


def module_names():
    """Files by the name of their module or package."""
    found = defaultdict(list)
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py") and path.parent not in SOLUTIONS:
            found[path.stem].append(path)
    for folder in {path.parent for path in FILES} - {SOURCE}:
        found[folder.name].append(folder)
    return found


def public_names(source):
    """Functions, classes and constants that a file defines at its top level."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def definitions():
    """Files by the public names that they define, solutions and cases aside."""
    found = defaultdict(list)
    for path in FILES:
        if path.parent not in SOLUTIONS:
            for name in set(public_names(path.read_text(encoding="utf-8"))):
                found[name].append(path)
    return found


def several(found):
    return {name: [str(p.relative_to(SOURCE)) for p in paths] for name, paths in found.items() if len(paths) > 1}


def test_no_two_modules_share_a_name():
    assert several(module_names()) == {}


def test_no_two_files_define_the_same_name():
    assert {name: paths for name, paths in several(definitions()).items() if name not in SHARED} == {}


def test_every_exception_is_needed():
    assert SHARED.keys() <= several(definitions()).keys()
