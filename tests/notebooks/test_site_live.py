"""Live pages: a figure of the site is changed by the course's own Python, in the page, without a notebook server.

The pages are built without JupyterLite, which takes longer and has its own tests.
"""

import base64
import functools
import gzip
import http.server
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings

import nbformat
import plotly
import pytest

from actmem_course.show.front_door import front_door
from actmem_course.show.in_page import IN_PAGE, run_cell
from notebooks.site import book, cache, live
from notebooks.site.runtime import PYTHON_FILES
from notebooks.site.slices import figures
from playwright.sync_api import expect
from tests.notebooks.opened import LIGHT_SHARE
from tests.notebooks.reader import Files, Reader

CHAPTERS = {path.stem: path for path in book.chapters()}
AXE_CORE = "axe-core@4.10.3"
#: Of a page and all it loads: as it is, and as a server that compresses sends it.
LARGEST_PAGE, LARGEST_COMPRESSED = 20_000_000, 8_000_000

REFUSE = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "plotly", "ipywidgets", "anywidget", "traitlets", "IPython", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.path[:] = [path for path in sys.path if "src" not in path]
sys.path.insert(0, sys.argv[1])
from actmem_course.show.in_page import Page
for cells in json.load(sys.stdin):
    page = Page(json.dumps(cells))
    for cell in cells:
        page.ask(json.dumps({"cell": cell}))
        print(cell)
"""


def stored(name):
    return nbformat.read(CHAPTERS[name], as_version=4)


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_panel_and_every_guess_of_a_chapter_is_live(name):
    code = [cell for cell in stored(name).cells if cell.cell_type == "code"]
    found = figures(stored(name))
    assert [cell.id for cell in code if re.search(r"^(Panel|Reveal)\(", cell.source, re.MULTILINE)] == [
        cell for cell in found if run_cell(found[cell]).moves.controls or run_cell(found[cell]).question
    ]
    for cell in code:
        if cell.id in found:
            (output,) = cell.outputs
            state = run_cell(found[cell.id]).state()
            for drawing in state["drawings"]:
                assert drawing["alt"] in output.data["text/plain"], "the page begins with what the notebook shows"
            if state["question"]:
                assert state["question"]["text"] in output.data["text/plain"]


def test_figures_need_none_of_the_packages_that_a_page_lacks(tmp_path):
    live.write_assets(tmp_path / "live")
    everything = [figures(stored(name)) for name in CHAPTERS] + [{"front": live.FRONT}]
    command = [sys.executable, "-S", "-c", REFUSE, str(tmp_path / "live" / "actmem.zip")]
    done = subprocess.run(command, input=json.dumps(everything), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [cell for cells in everything for cell in cells]


def test_pages_draw_with_the_plotly_of_the_notebooks():
    source = (plotly.__path__[0] + "/package_data/plotly.min.js",)
    with open(*source, encoding="utf-8") as file:
        (version,) = re.findall(r"plotly\.js v([\d.]+)", file.read(200))
    assert live.PLOTLY.endswith(f"@{version}")


def test_a_names_home_is_the_page_or_the_notebook():
    assert set(IN_PAGE) == {"Panel", "LiveFigure", "Prediction", "Reveal"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    try:
        (folder / "book").mkdir()
        book.write_sources(folder / "book")
        # Links to JupyterLite, which is not built here, lead nowhere; they are HTML, so nobody warns.
        book.build_pages(folder / "book", folder / "site")
        runtime = folder / "site" / "lite" / "static" / "pyodide"
        runtime.mkdir(parents=True)
        npm = cache.npm_package(cache.PYODIDE)
        for name in PYTHON_FILES:
            shutil.copy(npm / name, runtime)
        lock = json.loads((npm / "pyodide-lock.json").read_text(encoding="utf-8"))
        (runtime / "pyodide-lock.json").write_text(json.dumps({**lock, "packages": {}}), encoding="utf-8")
    except cache.SiteError as error:
        message = f"the pages can't be built, so NOTHING OF THEM WAS TESTED: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    return folder / "site"


@pytest.fixture(scope="module")
def address(site):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def reader(browser, address):
    """A new window: nothing is in its cache."""
    reader = Reader(browser, address)
    yield reader
    reader.context.close()


#: Axis titles that end outside of their figure, where nobody can read them.
CUT = """
() => [...document.querySelectorAll(".actmem-plot")].flatMap((plot) => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll("[class^=g-x] text")]
    .filter((text) => text.getBoundingClientRect().right > box.right + 1 || text.getBoundingClientRect().left < box.left - 1)
    .map((text) => text.textContent);
})
"""


#: Colours fade from one scheme to the other: half way, nothing has the contrast of either.
FADED = """
async () => {
  for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
  const ending = document.getAnimations().filter(({ effect }) => effect?.getComputedTiming().endTime < 5000);
  await Promise.allSettled(ending.map((animation) => animation.finished));
}
"""


def show_in(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.evaluate(FADED)


def no_sideways(page):
    width, inner = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner, "the page scrolls sideways"


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_front_door_by_keyboard(width, reader, shots):
    opened = reader.open("index.html", width=width)
    page = opened.page
    plot = page.locator(".actmem-plot")
    expect(plot).to_have_attribute("aria-label", front_door("175B", True, False, False, False).alt)
    for name, switches in (("sequence", (True, True, False, False)), ("selective", (True, True, True, False))):
        page.get_by_label(re.compile(name)).focus()
        page.keyboard.press("Space")
        expect(plot).to_have_attribute("aria-label", front_door("175B", *switches).alt)
    page.get_by_label("175B", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(plot).to_have_attribute("aria-label", front_door("530B", True, True, True, False).alt)
    expect(page.locator(".actmem-title")).to_contain_text("530B")
    assert plot.bounding_box()["width"] <= width
    for words in ("Read the course", "Run it in your browser"):
        assert page.get_by_role("link", name=words).is_visible()
    no_sideways(page)
    shots(page, f"front-{width}")
    reader.nothing_missing()
    assert opened.complaints == []


def test_a_figure_that_arrives_leaves_the_focus_where_it_is(reader):
    held = []
    reader.context.route("**/plotly.min.js", lambda route: held.append(route))
    page = reader.open("index.html").page
    switch = page.get_by_label("full recomputation")
    switch.focus()
    while not held:
        page.wait_for_timeout(50)
    held.pop().continue_()
    expect(page.locator(".actmem-plot .main-svg").first).to_be_visible()
    expect(page.locator(".actmem-still, .actmem-picture")).to_have_count(0)
    assert switch.evaluate("(node) => node === document.activeElement")


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_on_a_phone(name, reader, shots):
    """A guess by keyboard brings its figure; then the last control of each figure moves by keyboard."""
    opened = reader.open(f"notebooks/{name}.html", width=390)
    page = opened.page
    found = figures(stored(name))
    for cell in found:
        place = page.locator(f".actmem-shown[data-cell='{cell}']")
        place.scroll_into_view_if_needed()
        shown = run_cell(found[cell])
        if shown.question:  # the form comes when the page's script has run, which may be later than now
            form = place.locator(".actmem-guess")
            form.wait_for()
            assert not place.locator(".actmem-plot").count()
            form.locator("input").fill("seven")
            page.keyboard.press("Enter")
            expect(form.locator("output")).to_have_text(re.compile("^✗ seven is not a number"))
            form.locator("input").fill("7")
            page.keyboard.press("Enter")
            expect(form.locator("output")).to_have_text(re.compile("^You said 7"))
        expect(place).to_have_attribute("data-drawn", "true")
        wanted = [drawing.alt for drawing in shown.moves.drawings]
        plots = place.locator(".actmem-plot")
        assert [plot.get_attribute("aria-label") for plot in plots.all()] == wanted
        for number, control in list(enumerate(shown.moves.controls))[-1:]:
            place_now = shown.moves.options(control).index(shown.moves.values[control])
            key, to = ("ArrowLeft", place_now - 1) if place_now else ("ArrowRight", place_now + 1)
            if shown.moves.controls[control].look == "switch":
                key, to = "Space", 1 - place_now
            inputs = place.locator(".actmem-controls input")
            inputs = inputs.nth(inputs.count() - 1) if shown.moves.controls[control].look != "buttons" else place.locator(".actmem-choice").last.locator("input:checked")
            inputs.focus()
            page.keyboard.press(key)
            shown.moves.move(control, shown.moves.options(control)[to])
            for plot, drawing in zip(plots.all(), shown.moves.drawings, strict=True):
                expect(plot).to_have_attribute("aria-label", drawing.alt)
    no_sideways(page)
    shots(page, f"phone-{name}", full_page=True)
    reader.nothing_missing()
    assert opened.complaints == []  # of the page; axe-core looks for more than a page loads
    page.add_script_tag(path=cache.npm_package(AXE_CORE) / "axe.min.js")
    for scheme in ("light", "dark"):
        show_in(page, scheme)
        assert page.evaluate(AXE) == [], scheme


def test_how_long_a_reader_waits(browser, address, record_property):
    """From an empty cache over loopback.  Sizes have a limit; times are noted, because other work may run beside this."""
    paints, sliders, keys, sizes, compressed = [], [], [], [], []
    for _ in range(int(os.environ.get("ROUNDS", "2"))):
        reader = Reader(browser, address)
        received = []
        reader.context.on("response", lambda response: received.append(response))
        start = time.monotonic()
        page = reader.open("index.html").page
        switch = page.get_by_label("full recomputation")
        switch.wait_for()
        switch.focus()
        page.keyboard.press("Space")
        expect(page.locator(".actmem-plot")).to_have_attribute("aria-label", front_door("175B", True, False, False, True).alt)
        sliders.append(time.monotonic() - start)
        paints.append(page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        page.evaluate(WATCH)
        for press in range(20):
            page.keyboard.press("Space")
            # A key that comes before the figure has changed could undo the last one, and then nothing changes.
            shown = front_door("175B", True, False, False, press % 2 == 1).alt
            expect(page.locator(".actmem-plot")).to_have_attribute("aria-label", shown)
            page.wait_for_timeout(60)
        keys += page.evaluate("() => window.changes")
        bodies = [response.body() for response in received]
        sizes.append(sum(map(len, bodies)))
        compressed.append(sum(min(len(body), len(gzip.compress(body, 6))) for body in bodies))
        reader.context.close()
    numbers = {
        "first paint, ms": statistics.median(paints),
        "first slider, s": statistics.median(sliders),
        "key to figure, ms": statistics.median(keys),
        "page, MB": max(sizes) / 1e6,
        "page compressed, MB": max(compressed) / 1e6,
        "load": os.getloadavg()[0],
    }
    for name, value in numbers.items():
        record_property(name, round(value, 2))
        print(f"{name}: {value:.2f}")
    assert max(sizes) < LARGEST_PAGE and max(compressed) < LARGEST_COMPRESSED


#: The milliseconds from each key to the last change of the figure that it caused.
WATCH = """
() => {
  window.changes = [];
  let at = 0;
  document.addEventListener("keydown", () => { at = performance.now(); }, true);
  new MutationObserver(() => { if (at) { window.changes.push(performance.now() - at); at = 0; } })
    .observe(document.querySelector(".actmem-plot .main-svg"), { childList: true, subtree: true, attributes: true });
}
"""


PAGES = ["index", "notebooks/05_recomputation", "labs/lab1_count_bytes"]  # of each kind; of all: on a phone, and below
#: Rules of WCAG 2 A and AA, of which colour contrast and labels are parts; each breach with what it is about.
AXE = """
async () => (await axe.run(document, { runOnly: ["wcag2a", "wcag2aa"] })).violations
  .flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`))
"""


@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing_and_a_dark_page_has_no_white_slabs(path, reader, shots):
    opened = reader.open(f"{path}.html")
    page = opened.page
    for place in page.locator(".actmem-shown").all():
        place.scroll_into_view_if_needed()
        place.locator(".actmem-guess, .actmem-figures .actmem-plot").first.wait_for()
        for form in place.locator(".actmem-guess").all():
            form.get_by_role("button", name="Show me").click()
        expect(place).to_have_attribute("data-drawn", "true")
    assert opened.complaints == []  # of the page; axe-core looks for more than a page loads
    page.add_script_tag(path=cache.npm_package(AXE_CORE) / "axe.min.js")
    assert page.locator("article h1").count() == 1  # the page is there: a missing one has no breach either
    for scheme in ("light", "dark"):
        show_in(page, scheme)
        assert page.evaluate(AXE) == [], scheme
        for place in [page.locator("article h1"), *page.locator(".actmem-shown").all()]:
            place.scroll_into_view_if_needed()
            shot = base64.b64encode(page.screenshot()).decode()
            assert (page.evaluate(LIGHT_SHARE, shot) > 0.3) == (scheme == "light")
    shots(page, f"dark-{path.replace('/', '-')}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_page_of_any_lab(scheme, reader, site):
    page = reader.open("index.html").page
    page.emulate_media(color_scheme=scheme)
    for path in sorted((site / "labs").glob("*.html")):
        page.goto(f"{reader.address}/labs/{path.name}")
        page.add_script_tag(path=cache.npm_package(AXE_CORE) / "axe.min.js")
        assert page.locator("article h1").count() == 1
        page.evaluate(FADED)
        assert page.evaluate(AXE) == [], path.name


def test_a_page_opened_as_a_file_says_why_its_figures_stand_still(browser, site):
    page = browser.new_page()
    for name, figures_there in (("index", 1), ("notebooks/05_recomputation", len(figures(stored("05_recomputation"))))):
        page.goto((site / f"{name}.html").as_uri())
        expect(page.locator(".actmem-shown + .actmem-message")).to_have_count(figures_there)
        assert page.locator(".actmem-shown + .actmem-message").first.is_visible()
    page.close()


def test_a_slider_plays_and_with_reduced_motion_only_steps(reader):
    opened = reader.open("notebooks/05_recomputation.html")
    page = opened.page
    player = page.locator(".actmem-player")
    player.scroll_into_view_if_needed()
    slider = player.locator("input")
    first = int(slider.input_value())
    player.get_by_role("button", name="Play").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("([slider, first]) => Number(slider.value) >= first + 2", arg=[slider.element_handle(), first])
    page.keyboard.press("Enter")
    expect(player.get_by_role("button", name="Play")).to_be_visible()
    page.emulate_media(reduced_motion="reduce")
    expect(player.get_by_role("button", name="Play")).to_be_hidden()
    before = int(slider.input_value())
    player.get_by_role("button", name="one step on").click()
    assert int(slider.input_value()) == before + 1
    expect(page.locator(".actmem-shown:has(.actmem-player) .actmem-plot")).to_have_attribute("aria-label", re.compile(f"moment {before + 1} of"))
    assert opened.complaints == []
