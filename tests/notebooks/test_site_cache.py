"""What the site takes from registries: fetched once, and one clear line if it can't be had."""

import pytest

from notebooks.site import build, cache


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty cache, and a folder whose programs stand in for the installed ones."""
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return tools


def npm(tools, script):
    (tools / "npm").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tools / "npm").chmod(0o755)


GOOD = "echo called >> ../calls; mkdir package; echo 1 > package/index.js; tar czf some-1.0.tgz package; rm -r package"


def test_an_npm_package_is_fetched_once(empty):
    npm(empty, GOOD)
    first = cache.npm_package("some@1.0")
    assert (first / "index.js").read_text(encoding="utf-8") == "1\n"
    assert cache.npm_package("some@1.0") == first
    assert (first.parent / "calls").read_text(encoding="utf-8") == "called\n"


def test_no_npm_is_one_line(empty, monkeypatch):
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(cache.SiteError, match="^npm is missing, and some@1.0 comes from the npm registry: [^\n]*$"):
        cache.npm_package("some@1.0")


def test_an_npm_that_fails_is_one_line_and_leaves_nothing(empty):
    npm(empty, "echo 'npm error network ENOTFOUND' >&2; exit 1")
    with pytest.raises(cache.SiteError, match=r"^npm could not get some@1.0 \(no network\?\): npm error network ENOTFOUND$"):
        cache.npm_package("some@1.0")
    npm(empty, GOOD)
    assert cache.npm_package("some@1.0").exists()


def test_what_is_missing_is_said_in_one_line(monkeypatch, capsys):
    def fail(*arguments):
        raise cache.SiteError("npm is missing")

    monkeypatch.setattr(build, "build", fail)
    monkeypatch.setattr("sys.argv", ["build"])
    assert build.main() == 1
    assert capsys.readouterr() == ("", "make site: npm is missing\n")


