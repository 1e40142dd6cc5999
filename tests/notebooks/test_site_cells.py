"""Which statements of a chapter a browser can run is read from the code."""

import ast

import pytest

from notebooks.site.live import SOURCE, modules
from notebooks.site.needs import Reader, needs_machine


def test_a_page_has_all_that_its_modules_import():
    shipped = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in modules()}
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("actmem"):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                of_files = {name for name in names if (SOURCE / f"{name.replace('.', '/')}.py").is_file()}
                assert {node.module, *of_files} <= shipped, (path, node.module)


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("torch", True),
        ("torch.nn", True),
        ("numpy", True),
        ("subprocess", True),
        ("math", False),
        ("actmem", False),
        ("actmem.record", True),  # loaded when it is asked for
        ("actmem_course.others.paper", False),
        ("actmem.formulas.activations.eq1", False),
        ("actmem_course.show.widgets.Panel", False),
        ("actmem.measure.record", True),
        ("actmem.layers.transformer", True),
        ("actmem_course.launch.results", True),  # starts processes
        ("actmem.pipeline", True),
    ],
)
def test_modules_that_need_a_machine(module, needed):
    assert needs_machine(module) == needed


@pytest.mark.parametrize(
    ("cells", "measured"),
    [
        (["import math\nx = math.pi", "print(x)"], [[0, 0], [0]]),
        (["import torch\nx = torch.ones(2)", "y = x", "y = 1", "print(y)"], [[1, 1], [1], [0], [0]]),
        (["from actmem.measure import record", "f = lambda: record", "f()"], [[1], [1], [1]]),
        (["from actmem.measure import record as r\nfrom actmem.rows import total", "r", "total"], [[1, 0], [1], [0]]),
        (["import torch", "lines = []", "lines.append(torch.ones(1))", "print(lines)"], [[1], [0], [1], [1]]),
        (["import torch", "d = {}", "d['x'] = torch.ones(1)", "d"], [[1], [0], [1], [1]]),
        (["import torch", "d = {}", "d['x'] = 1", "d"], [[1], [0], [0], [0]]),
        (["import torch\ndef f():\n    return torch.ones(1)", "def g():\n    return f()", "g()"], [[1, 1], [1], [1]]),
        (["def f():\n    import torch\n    return torch.ones(1)", "f()"], [[1], [1]]),
        (["import torch\nx = torch.ones(1)", "[x for x in range(3)]", "x"], [[1, 1], [1], [1]]),
        (["import torch\nx = torch.ones(1)", "def f():\n    x = 2", "x"], [[1, 1], [0], [1]]),
    ],
)
def test_what_comes_from_a_machine_is_followed(cells, measured):
    reader = Reader()
    assert [[int(one.measured) for one in reader.read(cell)] for cell in cells] == measured


