"""The site as a reader sees it: served as files, in a Chromium that reaches nothing else.

A page shows each figure with its words, changes it by the course's own Python, in the page, and leads nowhere that is
not there.
Built once for all tests, from the cache in build/cache if it is there.  `make test` opens the chapters that have every
kind of control between them (stored_chapters.py), `make test-all` every chapter in every width and theme.
"""

import functools
import gzip
import http.server
import itertools
import json
import re
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import plotly
import pytest
from playwright.sync_api import expect

from actmem_course.figures.ch01_memory_wall import METHODS, memory_wall
from actmem_course.figures.in_page import Question, run_cell
from notebooks.site import cache, live
from notebooks.site.book import labs
from notebooks.site.build import build
from notebooks.site.cache import SiteError
from notebooks.site.slices import figures
from tests.notebooks.lab import not_here
from tests.notebooks.reader import WIDTHS, Files, Links, Reader, use
from tests.notebooks.stored_chapters import IN_JUPYTERLAB, NAMES, stored
from tests.tiers import at_night

#: By day the chapters with every kind of control, at night all.
BY_DAY = [name if name in IN_JUPYTERLAB else at_night(name) for name in NAMES]
AXE_CORE = "axe-core@4.10.3"
#: Of a page and all it loads, as a server that compresses sends it: before Python, and with it.
LARGEST_PAGE, LARGEST_WITH_PYTHON = 1_500_000, 8_500_000


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a new site."""
    folder = tmp_path_factory.mktemp("site") / "site"
    for name in NAMES:  # as they are now: someone may build them again while these tests run
        stored(name)
    try:
        build(folder, say=lambda line: None)
    except SiteError as error:
        not_here(f"the site can't be built, so NOTHING OF IT WAS TESTED: {error}")
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


@pytest.fixture
def reader(browser, address):
    """A new window: nothing is in its cache."""
    reader = Reader(browser, address)
    yield reader
    reader.context.close()


def pictures(notebook):
    """The words of each stored picture, in order."""
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    return [" ".join(output.data["text/plain"].split()) for output in outputs if "image/png" in output.get("data", {})]


def small_enough(received):
    """What a page loads from an empty cache, pictures at its end included."""
    bodies = {response.url: response.body() for response in received}
    sizes = {url: min(len(body), len(gzip.compress(body, 6))) for url, body in bodies.items()}
    python = sum(size for url, size in sizes.items() if "/pyodide/" in url or url.endswith("actmem.zip"))
    assert python and sum(sizes.values()) - python < LARGEST_PAGE and sum(sizes.values()) < LARGEST_WITH_PYTHON


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", BY_DAY)
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


# Live pages: a figure is changed in the page.

REFUSE = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "plotly", "ipywidgets", "anywidget", "traitlets", "IPython", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.path[:] = [path for path in sys.path if "src" not in path]
sys.path.insert(0, sys.argv[1])
from actmem_course.figures.in_page import run_cell
for cells in json.load(sys.stdin):
    for cell, code in cells.items():
        run_cell(code).stored()
        print(cell)
"""


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_and_every_guess_of_a_chapter_is_live(name):
    code = [cell for cell in stored(name).cells if cell.cell_type == "code"]
    found = figures(stored(name))
    assert [cell.id for cell in code if re.search(r"^(Panel|Reveal)\(", cell.source, re.MULTILINE)] == [
        cell for cell in found if run_cell(found[cell]).moves.controls or run_cell(found[cell]).question
    ]
    for cell in code:
        if cell.id in found:
            (output,) = (output for output in cell.outputs if "fingerprint" in output.get("metadata", {}))
            shown = run_cell(found[cell.id])
            state = shown.state()
            pictured = "-".join(drawing.fingerprint() for drawing in shown.moves.drawings)
            assert output.metadata.get("fingerprint", "") == pictured, "the stored picture is of another figure"
            for drawing in state["drawings"]:
                assert drawing["alt"] in output.data["text/plain"], "the page begins with what the notebook shows"
            if state["question"]:
                assert state["question"]["text"] in output.data["text/plain"]


def test_figures_need_none_of_the_packages_that_a_page_lacks(tmp_path):
    live.write_assets(tmp_path / "live")
    everything = [figures(stored(name)) for name in NAMES] + [{"front": live.FRONT}]
    command = [sys.executable, "-S", "-c", REFUSE, str(tmp_path / "live" / "actmem.zip")]
    done = subprocess.run(command, input=json.dumps(everything), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [cell for cells in everything for cell in cells]


def test_pages_draw_with_the_plotly_of_the_notebooks():
    source = (plotly.__path__[0] + "/package_data/plotly.min.js",)
    with open(*source, encoding="utf-8") as file:
        (version,) = re.findall(r"plotly\.js v([\d.]+)", file.read(200))
    assert live.PLOTLY.endswith(f"@{version}")


#: Colours fade from one scheme to the other: half way, nothing has the contrast of either.
FADED = """
async () => {
  for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
  const ending = document.getAnimations().filter(({ effect }) => effect?.getComputedTiming().endTime < 5000);
  const late = new Promise((end) => setTimeout(end, 5000));  // one whose element has gone may never end
  await Promise.race([late, Promise.allSettled(ending.map((animation) => animation.finished))]);
}
"""


#: Rules of WCAG 2 A and AA, of which colour contrast and labels are parts; each breach with what it is about.
AXE = """
async () => (await axe.run(document, { runOnly: ["wcag2a", "wcag2aa"] })).violations
  .flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`))
"""


def accessible(page):
    """Whether axe-core finds nothing on the page, light or dark."""
    page.add_script_tag(path=cache.npm_package(AXE_CORE) / "axe.min.js")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.evaluate(FADED)
        assert page.evaluate(AXE) == [], scheme


def no_sideways(page):
    width, inner = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner, "the page scrolls sideways"


@pytest.mark.parametrize("width", [at_night(1280), at_night(800), 390])
def test_the_front_door_by_keyboard(width, reader, shots):
    opened = reader.open("index.html", width=width)
    page = opened.page
    plot = page.locator(".actmem-plot")
    expect(plot).to_have_attribute("aria-label", memory_wall().alt)
    for before, method in itertools.pairwise(METHODS):
        page.get_by_label(before, exact=True).focus()
        page.keyboard.press("ArrowRight")
        expect(plot).to_have_attribute("aria-label", memory_wall(method).alt)
    expect(page.locator(".actmem-title")).to_contain_text("full recomputation")
    assert plot.bounding_box()["width"] <= width
    assert page.get_by_role("link", name="Read the course").is_visible()
    no_sideways(page)
    shots(page, f"front-{width}")
    reader.nothing_missing(opened)
    accessible(page)


#: Pixels of a phone's screen, from top to bottom.
PHONE = 844
#: Drawings and words that run out of their card, and words smaller than 9 pixels.
CUT = """
() => [...document.querySelectorAll(".actmem-card")].flatMap((card) => {
  const frame = card.getBoundingClientRect();
  return [...card.querySelectorAll(".main-svg, .main-svg text, .actmem-notes span, .actmem-legend span")].filter((part) => {
    const { left, right, top, bottom, width } = part.getBoundingClientRect();
    const isOut = left < frame.left - 1 || right > frame.right + 1 || top < frame.top - 1 || bottom > frame.bottom + 1;
    return width && (isOut || parseFloat(getComputedStyle(part).fontSize) < 9);
  }).map((part) => part.textContent.slice(0, 80));
})
"""


#: Where a question, its figure and the controls that give the answer away begin, in pixels from the top of the page; and the
#: printed lines that don't wrap.
ORDER = """
() => [".actmem-guess", ".actmem-figures", ".actmem-controls"].map((part) => document.querySelector(part).getBoundingClientRect().top + scrollY)
"""
UNWRAPPED = """
() => [...document.querySelectorAll(".cell_output > [class*=highlight] pre")].filter((pre) => pre.scrollWidth > pre.clientWidth).map((pre) => pre.textContent)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_DAY)
def test_a_chapter_on_a_phone_and_wider(name, reader, shots):
    """A guess by keyboard brings its figure; then the last control of each figure moves by keyboard; every drawing is whole.

    Also the drawings that only a machine can compute: a still picture is too small for a phone.  Then in wider windows:
    Python takes seconds to start in a page, so it starts once.
    """
    received = []
    reader.context.on("response", lambda response: received.append(response))
    opened = reader.open(f"notebooks/{Path(name).stem}.html", width=390)
    page = opened.page
    page.locator(".actmem-guess").first.wait_for()
    page.locator(".actmem-figures").first.wait_for()  # it has no height before its first drawing
    question, figure, controls = page.evaluate(ORDER)
    assert question < figure < controls and figure < PHONE, "the figure begins on the first screen"
    assert page.evaluate(UNWRAPPED) == []
    for cell, code in figures(stored(name)).items():
        use(page.locator(f".actmem-shown[data-cell='{cell}']"), run_cell(code))
    places = page.locator(".actmem-shown")
    expect(places).to_have_count(len(pictures(stored(name))))
    for place in places.all():
        place.scroll_into_view_if_needed()
        expect(place).to_have_attribute("data-drawn", "true")
    no_sideways(page)
    assert page.evaluate(CUT) == []
    shots(page, f"phone-{Path(name).stem}", full_page=True)
    page.locator("footer").last.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    small_enough(received)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1000})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            no_sideways(page)
            shots(page, f"page-{Path(name).stem}-{width}-{scheme}")
    formulas = page.locator("mjx-container").count()
    assert formulas or not any("$" in cell.source for cell in stored(name).cells if cell.cell_type == "markdown")
    reader.nothing_missing(opened)
    page.set_viewport_size({"width": 390, "height": 1000})
    accessible(page)  # it asks for style sheets of its own


#: Clicks in the page: so this process's way to the browser isn't counted.
CLICK = """
async () => {
  const form = document.querySelector(".actmem-guess"), began = performance.now();
  form.querySelector("input").value = "7";
  form.querySelector("button[type=submit]").click();
  await new Promise((next) => requestAnimationFrame(() => setTimeout(next)));
  return [performance.now() - began, form.querySelector("output").textContent];
}
"""
#: Of a click to its answer on screen, while Python starts.
MOST_MILLISECONDS = 300


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", BY_DAY)
def test_a_guess_is_answered_before_python_has_started(name, reader):
    reader.context.route("**/actmem.zip", lambda route: None)  # never arrives
    page = reader.open(f"notebooks/{Path(name).stem}.html").page
    place = page.locator(".actmem-shown").first
    expect(place).to_have_attribute("data-drawn", "true")
    clicks = [page.evaluate(CLICK) for _ in range(5)]
    shown = run_cell(next(iter(figures(stored(name)).values())))
    asked = shown.question
    assert all("You said 7" in said and asked.because in said for _, said in clicks)
    assert statistics.median(milliseconds for milliseconds, _ in clicks) < MOST_MILLISECONDS
    expect(place.locator(".actmem-plot").first).to_have_attribute("aria-label", shown.answer()["drawings"][0]["alt"])


#: Its functions need no figure, and so no Python that starts.
FIGURES = "live/figures.js"
#: Of the same traces as Python and as Plotly has them: how many there are, and all bars that have a value.
BARS = """
async (drawings) => {
  const { joined } = await import("/live/figures.js");
  const at = (value, bar) => Array.isArray(value) ? value[bar] : value;
  const bars = (data) => data.filter(({ type }) => type === "bar").flatMap(({ x, y, marker, insidetextfont, ...more }) => x.map((_, bar) => [
    x[bar], y[bar], at(marker.color, bar), marker.line, at(marker.pattern?.shape ?? "", bar), at(insidetextfont?.color ?? "", bar), at(marker.opacity ?? 1, bar),
    ...["text", "customdata", "base"].map((name) => at(more[name] ?? "", bar)), at(more.hovertemplate ?? more.hoverinfo, bar),
  ])).filter(([x, y]) => x !== null || y !== null);
  return drawings.map(({ data, layout }) => [data, joined(data, layout)].map((traces) => [traces.length, bars(traces)]));
}
"""


def test_bars_that_plotly_gets_as_one_trace_are_those_that_python_drew(reader):
    states = [run_cell(code).state() for name in NAMES for code in figures(stored(name)).values()]
    drawings = [drawing for state in states for drawing in state["drawings"]]
    found = reader.open(FIGURES).page.evaluate(BARS, drawings)
    for drawing, ((before, bars), (after, joined)) in zip(drawings, found, strict=True):
        assert joined == bars and after <= before
        if drawing["layout"].get("barmode") == "group":
            assert after == before, "bars beside each other are traces of their own"
    assert sum(after for _, (after, _) in found) < sum(before for (before, _), _ in found)


REPLIES = [
    (2.671, "GiB", "1", "You said 1 GiB. It is 2.67 GiB: 2.67 times your guess."),
    (2.671, "GiB", "2.65", "You said 2.65 GiB. It is 2.67 GiB: you have it."),
    (2.671, "GiB", " 3 ", "You said 3 GiB. It is 2.67 GiB: your guess is 1.12 times as much."),
    (870, "GiB", "8,700", "You said 8,700 GiB. It is 870 GiB: your guess is 10.0 times as much."),
    (124, "GiB", "96", "You said 96 GiB. It is 124 GiB: 1.29 times your guess."),
    (124, "GiB", "65", "You said 65 GiB. It is 124 GiB: your guess is about half of it."),
    (870, "GiB", "-870", "You said -870 GiB. It is 870 GiB: not close."),
    (0, "GiB", "0", "You said 0 GiB. It is 0 GiB: you have it."),
    (256, "GiB", "256 GiB", "You said 256 GiB. It is 256 GiB: you have it."),
    (12.5, "GiB", "12,5", "You said 12.5 GiB. It is 12.5 GiB: you have it."),
    (12500, "GiB", "12,500.0GiB", "You said 12,500 GiB. It is 12,500 GiB: you have it."),
    (70.15, "%", "35%", "You said 35%. It is 70.2%: your guess is about half of it."),
    *(
        (4321, "", text, "✗")
        for text in ("abc", "", "  ", "nan", "inf", "1e999", "1 2", "٣x", "1,2,3", "3 MiB", "1,23.4")
    ),
]


def test_a_guess_gets_the_answer_and_how_far_it_was_and_a_wrong_one_gives_nothing_away(reader):
    page = reader.open(FIGURES).page
    cases = [
        (text, unit, {"number": number, "reply": Question("", number, unit).reply()})
        for number, unit, text, _ in REPLIES
    ]
    said = page.evaluate(
        "async (cases) => { const { judged } = await import('/live/figures.js'); return cases.map((one) => judged(...one).reply); }",
        cases,
    )
    for reply, (*_, wanted) in zip(said, REPLIES, strict=True):
        assert reply == wanted or wanted == "✗" and reply.startswith("✗") and "4,321" not in reply


def test_a_guess_stands_where_it_is_on_a_logarithmic_axis_and_at_its_end_beyond(reader):
    """Chapter 3's guess and its logarithmic axis are in MiB."""
    answer = run_cell(next(iter(figures(stored("03_tensor_parallelism.ipynb")).values()))).answer()
    layout = answer["drawings"][0]["layout"]
    low, high = (10**end for end in layout["yaxis"]["range"])
    drawn = "async (guesses) => { const { guessLine } = await import('/live/figures.js'); return guesses.map(([guess, line, layout]) => guessLine(guess, line, layout)); }"
    found = reader.open(FIGURES).page.evaluate(
        drawn, [[guess, answer["line"], layout] for guess in (0, 256, 1536, 10**6)]
    )
    assert [line["y0"] for line in found] == pytest.approx([low, 256, 1536, high]) and layout["yaxis"]["type"] == "log"
    words = ["your guess, 0 ↓", "your guess", "your guess", "your guess, 1,000,000 ↑"]
    assert [line["label"]["text"] for line in found] == words


def test_a_labs_page_is_accessible(reader):
    page = reader.open("labs/lab1_count_bytes.html").page
    assert page.locator("article h1").count() == 1  # the page is there: a missing one has no breach either
    accessible(page)


def test_a_page_opened_as_a_file_says_why_its_figures_stand_still(browser, site):
    page = browser.new_page()
    for name, figures_there in (
        ("index", 1),
        ("notebooks/05_recomputation", len(pictures(stored("05_recomputation.ipynb")))),
    ):
        page.goto((site / f"{name}.html").as_uri())
        expect(page.locator(".actmem-shown + .actmem-message")).to_have_count(figures_there)
        assert page.locator(".actmem-shown + .actmem-message").first.is_visible()
        assert page.locator(".actmem-shown img").count() == figures_there
    page.close()


@pytest.mark.nightly
def test_a_slider_plays_and_with_reduced_motion_only_steps(reader):
    opened = reader.open("notebooks/05_recomputation.html")
    page = opened.page
    player = page.locator(".actmem-player")
    player.scroll_into_view_if_needed()
    slider = player.locator("input")
    first = int(slider.input_value())
    player.get_by_role("button", name="Play").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(
        "([slider, first]) => Number(slider.value) >= first + 2", arg=[slider.element_handle(), first]
    )
    page.keyboard.press("Enter")
    expect(player.get_by_role("button", name="Play")).to_be_visible()
    page.emulate_media(reduced_motion="reduce")
    expect(player.get_by_role("button", name="Play")).to_be_hidden()
    before = int(slider.input_value())
    player.get_by_role("button", name="one step on").click()
    assert int(slider.input_value()) == before + 1
    expect(page.locator(".actmem-shown:has(.actmem-player) .actmem-plot").last).to_have_attribute(
        "aria-label", re.compile(f"moment {before + 1} of")
    )
    assert opened.complaints == []
