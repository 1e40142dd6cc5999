"""A reader of the site: a server of its files, a window that opens its pages, the links on them; and how figures are used."""

import http.server
import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

from playwright.sync_api import expect

from actmem_course.figures.controls import BUTTONS
from tests.notebooks.lab import PATIENCE_SECONDS, OpenNotebook

#: Sizes of a window that the course has to be readable in.
WIDTHS = (1280, 800)


class Files(http.server.SimpleHTTPRequestHandler):
    missing = []

    def log_message(self, *message):
        pass

    def log_error(self, *message):
        self.missing.append(self.path)  # also what a page's complaint does not name


class Reader:
    """A window in which pages are opened one after the other.  asked: every address that they requested."""

    def __init__(self, browser, address):
        self.address = address
        self.context = browser.new_context(viewport={"width": WIDTHS[0], "height": 1000})
        self.asked, self.failed = [], []
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.context.on("requestfailed", lambda request: self.failed.append(f"{request.url}: {request.failure}"))
        self.context.on(
            "response", lambda response: self.failed.append(response.url) if response.status >= 400 else None
        )

    def open(self, path, width=WIDTHS[0]):
        """A new page at a path of the site, with a list of what it complains about."""
        self.asked.clear()
        self.failed.clear()
        Files.missing.clear()
        opened = OpenNotebook(self.context.new_page())
        opened.page.set_viewport_size({"width": width, "height": 1000})
        opened.page.set_default_timeout(1000 * PATIENCE_SECONDS)
        opened.page.goto(f"{self.address}/{path}")
        return opened

    def nothing_missing(self, opened):
        """Whether the last page sent requests to this server only, got everything, and complains about nothing."""
        elsewhere = [url for url in self.asked if not url.startswith((self.address, "data:", "blob:"))]
        assert (elsewhere, self.failed, Files.missing, opened.complaints) == ([], [], [], [])


def use(place, shown):
    """Use a figure on screen by keyboard, in a notebook or on a page: a guess, then its last control, one step.

    shown: the same figure, here; what is drawn has to be what it draws.
    """
    page, plots = place.page, place.locator(".actmem-plot")

    def matches():
        for plot, drawing in zip(plots.all(), shown.moves.drawings, strict=True):
            expect(plot).to_have_attribute("aria-label", drawing.alt)

    place.scroll_into_view_if_needed()
    expect(place).to_have_attribute("data-drawn", "true")
    matches()
    if asked := shown.question:
        form = place.locator(".actmem-guess")
        field, reply = form.locator("input"), form.locator("output")
        expect(reply).to_have_text("")
        field.fill("seven")
        page.keyboard.press("Enter")
        expect(reply).to_have_text(re.compile("^✗ seven is not a number"))
        expect(field).to_have_attribute("aria-invalid", "true")
        field.fill("7")
        page.keyboard.press("Enter")
        expect(reply).to_contain_text("You said 7")
        expect(reply).to_contain_text(asked.because)
        shown.answer()
        expect(plots.nth(asked.line.figure)).to_contain_text("your guess")
        matches()
    for name, control in list(shown.moves.controls.items())[-1:]:
        at = shown.moves.options(name).index(shown.moves.values[name])
        key, to = ("ArrowLeft", at - 1) if at else ("ArrowRight", at + 1)
        buttons = place.locator(".actmem-choice").last.locator("input:checked")
        (buttons if control.look == BUTTONS else place.locator(".actmem-controls input").last).focus()
        page.keyboard.press(key)
        shown.moves.move(name, shown.moves.options(name)[to])
        matches()


class Links(HTMLParser):
    """The ids of a page, and what it links to or loads, each with its tag."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        self.links += [(tag, urlsplit(attributes[name])) for name in ("href", "src") if attributes.get(name)]
