"""Files that labs write: whole or not at all, and refused before any work where that can be known."""

import argparse
import errno
import os
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from actmem.config import ConfigError
from actmem_course.files import check_files, write_text


def named(**files):
    return argparse.Namespace(**{name: file and Path(file) for name, file in files.items()})


def test_a_file_is_replaced_whole(tmp_path):
    path, link = tmp_path / "results.json", tmp_path / "link.json"
    link.symlink_to(path)
    for text in ("first", "§ second"):
        write_text(link, text)
        assert path.read_text(encoding="utf-8") == text and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.json", "results.json"]


@contextmanager
def full_disk(size):
    """No file grows beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")
    with full_disk(1000), pytest.raises(OSError) as error:
        write_text(path, "x" * 100_000)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["results.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_device_is_written_and_not_replaced():
    check_files(named(json="/dev/full"), "json")
    with pytest.raises(OSError) as error:
        write_text(Path("/dev/full"), "text")
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, "/dev/full")
    assert Path("/dev/full").is_char_device()


def test_what_is_refused(tmp_path):
    file, loop = tmp_path / "a.json", tmp_path / "loop"
    file.write_text("kept")
    loop.symlink_to(loop)
    cases = [
        (named(json=file, html=tmp_path / "." / "a.json"), r"html: .*a.json is the file of --json already"),
        (named(json=None, html=tmp_path / "none" / "a.html"), r"html: cannot write .*a.html: No such file or directory"),
        (named(json=file / "b.json", html=None), r"json: cannot write .*b.json: Not a directory"),
        (named(json=tmp_path, html=None), r"json: cannot write .*: Is a directory"),
        (named(json=loop, html=None), r"json: cannot write .*loop: "),
    ]  # fmt: skip
    for args, line in cases:
        with pytest.raises(ConfigError, match=f"^{line}"):
            check_files(args, "json", "html")
    check_files(named(json=file, html=None), "json", "html")
    assert file.read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["a.json", "loop"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        check_files(named(json=tmp_path / "a.json"), "json")


def test_only_rank_0_touches_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    check_files(named(json=tmp_path / "none" / "a.json"), "json")
    with pytest.raises(ConfigError, match="already"):
        check_files(named(json=tmp_path / "a", html=tmp_path / "a"), "json", "html")
