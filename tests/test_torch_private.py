"""torch's private names are used in one file only, and that file says on which versions it was checked."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PRIVATE_FILE = SOURCE / "actmem" / "torch_private.py"
#: Attributes of torch's objects without an underscore that no documentation names.
UNDOCUMENTED = {"fwd_cache", "args_recv_info", "StorageWeakRef"}


def private_names(source):
    """The private names of torch that a file uses: imported, below ``torch`` or ``dist``, or of a tensor or storage."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            root, *rest = name.split(".")
            if root in ("torch", "dist", "functional") and any(is_private(part) for part in rest):
                found.add(name)
            elif isinstance(node, ast.Attribute) and (node.attr == "_cdata" or node.attr in UNDOCUMENTED):
                found.add(node.attr)
    return found


def is_private(part):
    return (part.startswith("_") and not part.endswith("__")) or part in UNDOCUMENTED


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch.utils._pytree import tree_leaves", {"torch.utils._pytree.tree_leaves"}),
        ("import torch._C", {"torch._C"}),
        ("torch.ops._c10d_functional.wait_tensor(x)", {"torch.ops._c10d_functional", "torch.ops._c10d_functional.wait_tensor"}),
        ("from torch.multiprocessing.reductions import StorageWeakRef", {"torch.multiprocessing.reductions.StorageWeakRef"}),
        ("x.untyped_storage()._cdata", {"_cdata"}),
        ("self.fwd_cache[0]", {"fwd_cache"}),
        ("dist._get_default_group()", {"dist._get_default_group"}),
        ("from torch.distributed import init_process_group", set()),
        ("self._streams = torch.__version__", set()),
    ],
)  # fmt: skip
def test_private_names_are_seen(source, expected):
    assert private_names(source) == expected


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCE.rglob("*.py")) if path != PRIVATE_FILE],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_torchs_private_names_are_in_one_file(path):
    assert private_names(path.read_text(encoding="utf-8")) == set()


def test_that_file_uses_them_all():
    assert private_names(PRIVATE_FILE.read_text(encoding="utf-8")) >= {
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.utils._pytree.tree_leaves",
        "fwd_cache",
    }
