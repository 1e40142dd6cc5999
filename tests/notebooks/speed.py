"""How fast the pages of build/site answer in Chromium: python -m tests.notebooks.speed [06 …]

Two times a page.  First answer: from the click on "This is my guess" to its words on screen, in a new window with an empty
cache, while Python is still loading; the median of ten windows.  Key to figure: from a key on the last control of a figure to
the end of its last drawing, ten keys for each figure of the page, a tenth of a second apart; the median of the page, and that of
its slowest figure.
Not a test: a busy machine would fail it.
"""

from __future__ import annotations

import functools
import http.server
import statistics
import sys
import threading

from playwright.sync_api import Browser, Page, expect, sync_playwright

from notebooks.site.build import SITE
from notebooks.source.pictures import CHROMIUM_FLAGS, chromium
from tests.notebooks.reader import Files

WINDOWS = KEYS = 10
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
#: Of one figure: sends a key's effect to its last control, and waits for the drawings that follow.
MOVE = """
async (place) => {
  const inputs = [...place.querySelectorAll(".actmem-controls input")], last = inputs.at(-1);
  await new Promise((next) => setTimeout(next, 100));
  const plots = [...place.querySelectorAll(".actmem-plot")];
  const drawn = Promise.all(plots.map((plot) => new Promise((done) => plot.once("plotly_afterplot", done))));
  const began = performance.now();
  if (last.type === "range") {
    last.value = String(Number(last.value) > 0 ? Number(last.value) - 1 : 1);
    last.dispatchEvent(new Event("input", { bubbles: true }));
  } else {
    inputs.findLast((one) => one.name === last.name && !one.checked).click();
  }
  await drawn;
  return performance.now() - began;
}
"""


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Nothing: a window that closes drops what it was loading."""


def first_answers(browser: Browser, address: str) -> list[float]:
    """Milliseconds from click to answer, one for each new window."""
    found = []
    for _ in range(WINDOWS):
        context = browser.new_context()
        page = context.new_page()
        page.goto(address, wait_until="commit")
        page.locator(".actmem-guess").first.wait_for()
        milliseconds, said = page.evaluate(CLICK)
        assert said.startswith("You said 7"), said
        found.append(milliseconds)
        context.close()
    return found


def keys_to_figure(page: Page) -> list[float]:
    """For each figure with controls the median milliseconds from a key to its drawing."""
    found = []
    page.locator(".actmem-controls input").first.wait_for(state="attached")
    for place in page.locator(".actmem-shown").all():
        if not place.locator(".actmem-controls input").count():
            continue
        place.scroll_into_view_if_needed()
        expect(place).to_have_attribute("data-drawn", "true", timeout=60_000)
        place.evaluate(MOVE)  # Python has started, and has drawn this figure once
        found.append(statistics.median(place.evaluate(MOVE) for _ in range(KEYS)))
    return found


def main() -> None:
    chosen = [
        path for path in sorted(SITE.glob("notebooks/*.html")) if not sys.argv[1:] or path.name[:2] in sys.argv[1:]
    ]
    files = functools.partial(Files, directory=SITE)
    with Server(("127.0.0.1", 0), files) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        print("page, milliseconds: first answer; key to figure: median, slowest figure")
        for path in chosen:
            address = f"http://127.0.0.1:{server.server_address[1]}/notebooks/{path.name}"
            answer = statistics.median(first_answers(browser, address))
            page = browser.new_page()
            page.goto(address)
            keys = keys_to_figure(page)
            print(f"{path.stem}: {answer:.0f}; {statistics.median(keys):.0f}, {max(keys):.0f}", flush=True)
            page.close()
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
