"""A reader of the site: a server of its files, a window that opens its pages, and the links on them."""

from __future__ import annotations

import http.server
from html.parser import HTMLParser
from urllib.parse import urlsplit

from tests.notebooks.opened import PATIENCE_SECONDS, OpenNotebook

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
        self.context.on("response", lambda response: self.failed.append(response.url) if response.status >= 400 else None)

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

    def nothing_missing(self):
        """Whether the last page sent requests to this server only, and got everything."""
        elsewhere = [url for url in self.asked if not url.startswith((self.address, "data:", "blob:"))]
        assert (elsewhere, self.failed, Files.missing) == ([], [], [])


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
