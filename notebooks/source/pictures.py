"""Still pictures of figures, drawn by Chromium with the same plotly.js that notebooks use."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import plotly

from actmem_course.figures.marks import Drawing
from actmem_course.figures.ch01_memory_wall import memory_wall

#: In CSS pixels, and device pixels for each.
WIDTH, SCALE = 900, 1.25
#: For Debian's Chromium, which runs as root in containers, and which should reach nothing.
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PICTURES = Path(__file__).resolve().parents[1] / "pictures"


def front_drawing() -> Drawing:
    """What the README opens with: the paper's four models, with both of its methods."""
    return memory_wall("tensor+sequence+selective")


def front_picture() -> Path:
    """Where the README's picture lies.  Its name changes with the drawing, so that a stale one is missed."""
    return PICTURES / f"memory_wall_{front_drawing().fingerprint()}.png"


_DRAW = """
async (specs) => {
  document.body.replaceChildren();
  for (const { data, layout, config } of specs) {
    const node = document.createElement("div");
    document.body.append(node);
    node.style.height = `${layout.height}px`;
    await Plotly.newPlot(node, data, layout, { ...config, staticPlot: true });
  }
}
"""


def chromium() -> str | None:
    """Path of an installed Chromium or Chrome; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Painter:
    """One browser for all pictures of a build."""

    def __init__(self, browser: str):
        self._path = browser

    def __enter__(self) -> Painter:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=self._path, args=list(CHROMIUM_FLAGS))
        self._page = self._browser.new_page(viewport={"width": WIDTH, "height": 400}, device_scale_factor=SCALE)
        self._page.set_content("<!doctype html><body style='margin:0'></body>")
        self._page.add_script_tag(path=Path(plotly.__file__).parent / "package_data" / "plotly.min.js")
        return self

    def __exit__(self, *error: object) -> None:
        self._browser.close()
        self._playwright.stop()

    def paint(self, specs: list[dict]) -> str:
        """A PNG in base64 of one or more figures, below each other."""
        self._page.evaluate(_DRAW, specs)
        return base64.b64encode(self._page.locator("body").screenshot()).decode()
