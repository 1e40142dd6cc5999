"""Snapshots of a GPU's allocator, read as a record's result."""

import pickle

import pytest

from actmem_tools.__main__ import main
from actmem_tools.snapshot import read_snapshot

HERE = "tests.measure.factories_for_tests"
FRAMES = [
    {"filename": "??", "line": 0, "name": "at::empty"},
    {"filename": "/site/torch/nn/functional.py", "line": 9, "name": "linear"},
    {"filename": "/home/me/model.py", "line": 7, "name": "forward"},
]


def event(action, address, size, frames=()):
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": list(frames)}


def block(address, size, state="active_allocated"):
    return {"address": address, "size": size, "requested_size": size - 1, "state": state, "frames": []}


#: Weights from before, of which one waits to be freed, one activation that stays, one that goes, something from before that goes, an address used again.
TRACE = [
    event("segment_alloc", 0, 1 << 21),
    event("alloc", 512, 1024, FRAMES),
    event("alloc", 1536, 512),
    event("free_requested", 1536, 512),
    event("free_completed", 1536, 512),
    event("free_completed", 4096, 2048),
    event("alloc", 1536, 512),
]
BLOCKS = [block(0, 512), block(512, 1024), block(1536, 512), block(2048, 512, "active_pending_free")]
BLOCKS.append(block(2560, (1 << 21) - 2560, "inactive"))
SEGMENT = {"address": 0, "total_size": 1 << 21, "device": 1, "stream": 0, "segment_type": "small", "blocks": BLOCKS}
SEEN = {"segments": [SEGMENT], "device_traces": [[], TRACE], "allocator_settings": {}}


def dumped(path, value):
    path.write_bytes(pickle.dumps(value))
    return str(path)


def test_a_trace_is_replayed_from_what_was_there_before(tmp_path):
    result = read_snapshot(dumped(tmp_path / "seen.pickle", SEEN))
    assert result["curve"] == [3072, 4096, 4608, 4096, 2048, 2560]
    assert result["peak_bytes"] == 4608 == sum(row["bytes"] for row in result["peak"])
    assert result["total_bytes"] == 2560 == sum(row["bytes"] for row in result["rows"])
    (mine,) = (row for row in result["rows"] if row["line"])
    assert (mine["op"], mine["line"], mine["kind"]) == ("linear", "model.py:7", "allocated")
    assert sum(row["bytes"] for row in result["peak"] if row["kind"] == "from before") == 2 * 512 + 2048


def test_the_command_shows_a_snapshot_and_draws_its_page(tmp_path, capsys):
    path, page = dumped(tmp_path / "seen.pickle", SEEN), tmp_path / "page.html"
    assert main(["record", path, "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("peak 4,608 B, 2,560 B at the end") and "model.py:7" in page.read_text()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_strangers_pickle_runs_nothing(tmp_path, capsys):
    for number, value in enumerate(
        [Evil(str(tmp_path / "ran")), {**SEEN, "device_traces": [[Evil(str(tmp_path / "ran"))]]}]
    ):
        path = dumped(tmp_path / f"{number}.pickle", value)
        assert main(["record", path]) == 2
        error = capsys.readouterr().err
        assert "is no snapshot" in error and "io.open" in error and error.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "contents", [b"\x80", b"\x80\x05K\x01.", pickle.dumps({"segments": []}), pickle.dumps(SEEN)[:-20]]
)
def test_what_is_no_snapshot_is_one_line(contents, tmp_path, capsys):
    path = tmp_path / "x.pickle"
    path.write_bytes(contents)
    assert main(["record", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
