"""Still pictures of figures, drawn by Chromium with the same plotly.js that notebooks use."""

from __future__ import annotations

import base64
import shutil
import struct
import zlib
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


#: The colours of a picture, at most 256 of them, and each pixel's place among them: charts have few.
_COLOURS = """
async (png) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const { width, height } = image, canvas = new OffscreenCanvas(width, height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const bytes = canvas.getImageData(0, 0, width, height).data, times = new Map();
  const pixels = Array.from({ length: width * height }, (_, i) => bytes[4 * i] << 16 | bytes[4 * i + 1] << 8 | bytes[4 * i + 2]);
  for (const colour of pixels) times.set(colour, (times.get(colour) ?? 0) + 1);
  const palette = [...times].sort((one, other) => other[1] - one[1]).slice(0, 256).map(([colour]) => colour);
  const parts = (colour) => [colour >> 16, colour >> 8 & 255, colour & 255];
  const apart = (one, other) => parts(one).reduce((sum, part, i) => sum + (part - parts(other)[i]) ** 2, 0);
  const place = new Map(palette.map((colour, i) => [colour, i]));
  for (const colour of times.keys()) {
    if (place.has(colour)) continue;
    const far = palette.map((known) => apart(known, colour));
    place.set(colour, far.indexOf(Math.min(...far)));
  }
  const indices = pixels.map((colour) => String.fromCharCode(place.get(colour)));
  return [width, height, palette.flatMap(parts), btoa(indices.join(""))];
}
"""


def png_of(width: int, height: int, palette: bytes, indices: bytes) -> bytes:
    """A PNG of one byte a pixel: a third of the size that Chromium gives a chart.

    Args:
        width, height: In pixels.
        palette: Red, green and blue of each colour, at most 256 of them.
        indices: For each pixel its place in the palette, row after row.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + indices[row * width : (row + 1) * width] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits a pixel, by palette
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


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
        return self.compact(base64.b64encode(self._page.locator("body").screenshot()).decode())

    def compact(self, png: str) -> str:
        """The same picture with at most 256 colours; both in base64."""
        width, height, palette, indices = self._page.evaluate(_COLOURS, png)
        return base64.b64encode(png_of(width, height, bytes(palette), base64.b64decode(indices))).decode()
