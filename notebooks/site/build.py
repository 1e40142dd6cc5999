"""Build the course as a static site: python -m notebooks.site.build

Everything is made from the stored notebooks; no cell is run.  The first time, parts come from
the npm registry; after that the site builds without network.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from notebooks.site import book, cache

SITE = cache.ROOT / "build" / "site"
#: Any server of files will do; browsers run no scripts from file:// addresses.
VIEW = "python3 -m http.server --bind 127.0.0.1 --directory build/site 8000, then http://127.0.0.1:8000"


def build(target: Path, say: Callable[[str], None] = print) -> None:
    """Make the whole site in ``target``; what is there is replaced once all is well.

    say: called with a line before each step.  Raises cache.SiteError with one line that says what is missing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".site-") as temporary:
        folder = Path(temporary)
        say("what the pages load (fetched the first time, then kept in build/cache)")
        book_sources = folder / "book"
        book_sources.mkdir()
        book.write_sources(book_sources)
        say("the pages, by jupyter-book")
        book.build_pages(book_sources, folder / "site")
        shutil.rmtree(target, ignore_errors=True)
        (folder / "site").rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m notebooks.site.build", description=__doc__.split("\n\n")[1])
    parser.parse_args()
    start = time.monotonic()
    try:
        build(SITE, lambda line: print(f"  {line}", flush=True))
    except cache.SiteError as error:
        print(f"make site: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
    print(f"{SITE.relative_to(cache.ROOT)}: {size / 1e6:.0f} MB in {time.monotonic() - start:.0f} s; to read it: {VIEW}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
