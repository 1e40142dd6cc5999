"""The page that ``record --html`` writes, in a browser."""

from typing import Any

import pytest

from actmem_tools.record_page import page

ROW = {"argument": "", "shape": [4], "dtype": "float32", "line": "", "held_by": ""}
ROWS: list[dict[str, Any]] = [
    {**ROW, "module": f"model.layers.{i}.{name}", "op": "linear", "bytes": 4000 * (i + 1), "kind": kind}
    for i in range(3)
    for name, kind in (("up", "activation"), ("down", "input"))
]
RESULT = {
    "target": "mine.py:model", "total_bytes": sum(row["bytes"] for row in ROWS), "rows": ROWS, "peak": ROWS, "peak_bytes": 30_000,
    "curve": [1000, *([30_000] * 90)], "phases": [["forward", 0], ["backward", 2], ["optimizer", 4], ["backward", 89]],
}  # fmt: skip
OVERLAPS = """() => { const boxes = [...document.querySelectorAll('#curve .axis')].map(one => one.getBoundingClientRect());
  return boxes.filter((a, i) => boxes.some((b, j) => i < j && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length }"""


@pytest.mark.by_day(1)
@pytest.mark.parametrize("width", [390, 1280])
def test_first_view_legend_and_labels(browser, tmp_path, width):
    (tmp_path / "page.html").write_text(page(RESULT), encoding="utf-8")
    view = browser.new_page(viewport={"width": width, "height": 800})
    errors = []
    view.on("pageerror", lambda error: errors.append(error))
    view.goto(f"file://{tmp_path}/page.html")
    assert not errors and view.locator("#map rect").count() == 3  # not the one block of model, nor that of layers
    assert [one.text_content() for one in view.locator("#map button").all()] == ["model", "model", "layers"]
    assert view.locator("#map .key").all_text_contents() == ["activation"]
    view.locator("#map rect").first.click()
    assert view.locator("#map rect").count() == 2
    assert sorted(view.locator("#map .key").all_text_contents()) == ["activation", "input"]
    assert view.locator("#curve .axis").count() == 5 and view.evaluate(OVERLAPS) == 0
    view.close()
