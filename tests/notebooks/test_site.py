"""The site as a reader sees it: served as files, in a Chromium that reaches nothing else.

Every chapter's page shows its figures with their words and leads nowhere that is not there;
beside it, the notebook that runs in the browser prints what the stored one says and its sliders
move.  Built once for all tests, from the cache in build/cache if it is there.
"""

import functools
import http.server
import inspect
import os
import threading
import warnings
from pathlib import Path
from urllib.parse import parse_qs, unquote

import nbformat
import pytest

from notebooks.site.book import chapters, labs
from notebooks.site.browser import for_browser
from notebooks.site.build import build
from notebooks.site.cache import SiteError
from tests.notebooks.kinds import IN_JUPYTERLITE
from tests.notebooks.mutate import run
from tests.notebooks.opened import wait_for_kernel
from tests.notebooks.panels import DESCRIBE, use_panel
from tests.notebooks.predictions import use_predictions
from tests.notebooks.reader import WIDTHS, Files, Links, Reader

NAMES = [path.name for path in chapters()]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a new site."""
    folder = tmp_path_factory.mktemp("site") / "site"
    for name in NAMES:  # as they are now: someone may build them again while these tests run
        stored(name)
    try:
        build(folder, say=lambda line: None)
    except SiteError as error:
        message = f"the site can't be built, so NOTHING OF IT WAS TESTED: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="module")
def address(site):
    """Where a server of files, and nothing more, serves the site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def reader(browser, address):
    reader = Reader(browser, address)
    yield reader
    reader.context.close()


@functools.cache
def stored(name):
    path = next(path for path in chapters() if path.name == name)
    return nbformat.read(path, as_version=4)


def pictures(notebook):
    """The words of each stored picture, in order."""
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    return [" ".join(output.data["text/plain"].split()) for output in outputs if "image/png" in output.get("data", {})]


PAGE = """
() => ({
  formulas: document.querySelectorAll("mjx-container").length,
  article: document.querySelector("article").getBoundingClientRect().width,
  page: [document.documentElement.scrollWidth, innerWidth],
})
"""
#: The least contrast of text and what it stands on, over the kinds of text that a page has.
CONTRAST = """
() => {
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (node) => { for (; node; node = node.parentElement) {
    const colour = numbers(getComputedStyle(node).backgroundColor); if (colour.length === 3 || colour[3] > 0.9) return colour; } return [255, 255, 255]; };
  const found = [...document.querySelectorAll("article p, article li, article td, article a:not(.headerlink), article pre, article pre span, article summary, article h2")]
    .filter((node) => node.checkVisibility() && node.textContent.trim())
    .map((node) => { const [a, b] = [numbers(getComputedStyle(node).color), ground(node)].map(light);
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.tagName + " " + node.className + ": " + node.textContent.slice(0, 40)]; });
  return [found.length, ...found.reduce((worst, one) => one[0] < worst[0] ? one : worst)];
}
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_is_a_page(name, reader, shots):
    opened = reader.open(f"notebooks/{Path(name).stem}.html")
    page = opened.page
    page.wait_for_load_state("networkidle")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1000})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            seen = page.evaluate(PAGE)
            assert seen["page"][0] <= seen["page"][1], "the page scrolls sideways"
            texts, contrast, where = page.evaluate(CONTRAST)
            assert texts > 50 and contrast >= 4.5, where
            shots(page, f"page-{Path(name).stem}-{width}-{scheme}")
    assert seen["formulas"] or not any("$" in cell.source for cell in stored(name).cells if cell.cell_type == "markdown")
    assert page.locator(".actmem-live a").get_attribute("href") == f"../lite/notebooks/index.html?path=notebooks/{name}"
    reader.nothing_missing()
    assert opened.complaints == []
    page.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_without_javascript_has_the_pictures(name, browser, address):
    context = browser.new_context(java_script_enabled=False, viewport={"width": WIDTHS[0], "height": 1000})
    page = context.new_page()
    page.goto(f"{address}/notebooks/{Path(name).stem}.html", wait_until="load")
    words = pictures(stored(name))
    images = page.locator("article img")
    assert [image.get_attribute("alt") for image in images.all()] == words and all(len(alt) > 40 for alt in words)
    for image in images.all():
        assert image.evaluate("(img) => img.complete && img.naturalWidth > 300")
    context.close()


def test_the_front_page_is_the_readme_with_the_chapters(reader):
    opened = reader.open("index.html")
    text = opened.page.locator("article").inner_text()
    assert "make course" in text and "The chapters" in text
    for name in NAMES:
        # The front door's button leads to the first one as well.
        assert opened.page.locator(f'article a[href$="notebooks/{Path(name).stem}.html"]').count() >= 1
    reader.nothing_missing()
    assert opened.complaints == []
    opened.page.close()


def test_no_link_is_broken(site):
    pages = {path: Links(path) for folder in (".", "notebooks", "labs") for path in (site / folder).glob("*.html")}
    assert len(pages) >= 1 + len(NAMES) + len(labs())
    for path, page in pages.items():
        assert len(page.links) > 30
        for tag, link in page.links:
            where = f"{path.name}: {link.geturl()}"
            if link.scheme or link.netloc:
                assert tag == "a" and link.scheme == "https", f"loaded from elsewhere: {where}"
                continue
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            assert target.is_file(), where
            assert not link.fragment or target not in pages or link.fragment in pages[target].ids, where
            for inside in parse_qs(link.query).get("path", []):
                assert (site / "lite" / "files" / inside).is_file(), where


#: For a kernel: how a cell is run, in names of its own, beside those of the open notebook.
RUN = "import ast, contextlib, io, json\nfrom types import SimpleNamespace\nCell = object\n" + inspect.getsource(run)
SAY = """
names = {"__name__": "__main__"}
print(json.dumps([run(SimpleNamespace(code=ast.parse(source)), names)[0] for source in SOURCES]))
"""


def test_chapters_run_in_the_browser(reader, shots):
    """One as a reader uses it; then, in the Python that it has started, the cells of all others."""
    name = IN_JUPYTERLITE
    opened = reader.open(f"lite/notebooks/index.html?path=notebooks/{name}")
    wait_for_kernel(opened.page)
    cells = opened.run_all()
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert [cell["count"] for cell in cells] == list(range(1, len(cells) + 1))
    wanted = [cell for cell in for_browser(stored(name)).cells if cell.cell_type == "code"]
    for cell, expected in zip(cells, wanted, strict=True):
        assert cell["source"] == expected.source
        assert printed(cell["outputs"]) == printed(expected.outputs), cell["source"]
    use_predictions(opened)  # with the answers come their figures
    panels = opened.ask(DESCRIBE)
    assert len(panels) == sum("Panel(" in cell.source for cell in stored(name).cells if cell.cell_type == "code")
    for number, panel in enumerate(panels):
        use_panel(opened, number, panel, lambda box, number=number: shots(box, f"live-{Path(name).stem}-panel{number + 1}"), controls=1)
    wrong = {}
    for other in NAMES:
        if other != name:
            cells = [cell for cell in for_browser(stored(other)).cells if cell.cell_type == "code"]
            said = opened.ask(f"{RUN}\nSOURCES = {[cell.source for cell in cells]!r}\n{SAY}")
            wanted = ["".join(o.get("text") or o["data"]["text/plain"] for o in cell.outputs) for cell in cells]
            assert any(wanted) and len(said) == len(wanted)
            wrong |= {(other, cell.source): got for cell, got, text in zip(cells, said, wanted) if got != text}
    assert wrong == {}
    reader.nothing_missing()
    assert opened.complaints == []
    opened.page.close()


@pytest.mark.parametrize(
    ("name", "link", "leads_to"),
    [
        ("00_start_here.ipynb", "01_memory_wall.ipynb", "/lite/notebooks/index.html?path=notebooks/01_memory_wall.ipynb"),
        ("03_tensor_parallelism.ipynb", "lab2_tensor_parallel.py", "/labs/lab2_tensor_parallel.html"),
    ],
)
def test_links_of_a_live_chapter(name, link, leads_to, reader):
    opened = reader.open(f"lite/notebooks/index.html?path=notebooks/{name}")
    page = opened.page
    page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length > 3")
    cell = next(number for number, cell in enumerate(for_browser(stored(name)).cells) if f"{link})" in cell.source)
    page.evaluate(SHOW_CELL, cell)
    with reader.context.expect_page() as opening:
        page.locator(f".jp-RenderedMarkdown a[href*='/{link}']").first.click()
    opening.value.wait_for_load_state()
    assert opening.value.url == reader.address + leads_to
    opening.value.close()
    page.close()


SHOW_CELL = """
async (number) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = number;
  await notebook.scrollToCell(notebook.widgets[number], "start");
}
"""


def printed(outputs):
    """All that cells say as text: streams joined, results, errors."""
    streams = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    results = ["".join(output["data"]["text/plain"]) for output in outputs if "data" in output]
    return streams, results, [output["ename"] for output in outputs if output["output_type"] == "error"]
