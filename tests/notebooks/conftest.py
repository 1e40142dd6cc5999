"""The browser that the tests of notebooks and of the site share."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from notebooks.source.pictures import CHROMIUM_FLAGS, chromium
from tests.notebooks.lab import PATIENCE_SECONDS, not_here

pytest.register_assert_rewrite("tests.notebooks.reader")

expect.set_options(timeout=1000 * PATIENCE_SECONDS)

#: No name but this machine's own has an address: a page that asks for anything else fails.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.fixture(scope="module")
def browser():
    path = chromium()
    if path is None:
        not_here("no Chromium here: NOTHING WAS TESTED IN A BROWSER (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*CHROMIUM_FLAGS, OFFLINE])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shots():
    """``shots(page, name)``: a screenshot in the folder that SCREENSHOTS names; nothing if it names none."""
    folder = os.environ.get("SCREENSHOTS")

    def take(place, name, **options):
        if folder:
            place.screenshot(path=Path(folder) / f"{name}.png", **options)

    return take
