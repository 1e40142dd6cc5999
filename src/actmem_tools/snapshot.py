"""Read allocations of a GPU as ``torch.cuda.memory._dump_snapshot`` writes them.

A snapshot is a pickle of plain values: segments with their blocks at the end, and of each device the trace of what its
allocator did.  A stranger's pickle could run code, so the reader knows no class and no function at all.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NoReturn

from actmem.config import ConfigError
from actmem.ledger.ledger_tables import SavedTensor

_BEFORE = "from before"
_TORCH = f"{os.sep}torch{os.sep}"


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot holds plain values only")


def is_snapshot(path: str) -> bool:
    """True for a file that begins as a pickle does."""
    try:
        with open(path, "rb") as file:
            return file.read(1) == pickle.PROTO
    except OSError:
        return False


def read_snapshot(path: str) -> dict[str, Any]:
    """What ``record --step --json`` writes, of a snapshot's first device that did anything.

    rows: what is allocated at the end.  peak, curve: as of a step; a moment is an allocation or a release.  Of what was
    allocated before the trace begins, only bytes are known.  Raises ConfigError if the file is no snapshot, or names a
    class or a function.
    """
    try:
        with open(path, "rb") as file:
            snapshot = _PlainValues(file).load()
        traces = snapshot["device_traces"]
        device = next((i for i, trace in enumerate(traces) if trace), 0)
        events = [
            (event["action"] == "alloc", event["addr"], event["size"], event.get("frames") or [])
            for event in (traces[device] if traces else ())
            if event["action"] in ("alloc", "free_completed")
        ]
        live: dict[int, dict[str, Any]] = {}  # at the end, and then before the first event
        for segment in snapshot["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                if segment["device"] == device and block["state"] != "inactive":  # one that awaits its free is there
                    live[block.get("address", address)] = _row(block["size"], block.get("frames") or [], _BEFORE)
                address += block["size"]
        for allocates, address, size, frames in reversed(events):
            if allocates:
                live.pop(address, None)
            else:
                live[address] = _row(size, frames, _BEFORE)
        replayed = _replayed(events, live)
    except OSError as error:
        raise ConfigError(path, error.strerror or "can't be read") from error
    except Exception as error:  # whatever nonsense makes the unpickler raise
        text = str(error) if isinstance(error, pickle.UnpicklingError) else type(error).__name__
        raise ConfigError(path, f"is no snapshot of torch.cuda.memory: {text}") from error
    return {"target": Path(path).name, "notes": [], "findings": [], "phases": [["trace", 0]], **replayed}


def _replayed(events: list[tuple[bool, int, int, list]], live: dict[int, dict[str, Any]]) -> dict[str, Any]:
    at_peak, curve = dict(live), [sum(row["bytes"] for row in live.values())]
    for event in events:
        curve.append(curve[-1] + _change(live, *event))
    for event in events[: curve.index(max(curve))]:
        _change(at_peak, *event)
    at_end = {"rows": list(live.values()), "total_bytes": curve[-1], "by_kind": {}}
    return {**at_end, "peak": list(at_peak.values()), "peak_bytes": max(curve), "curve": curve}


def _change(live: dict[int, dict[str, Any]], allocates: bool, address: int, size: int, frames: list) -> int:
    """Replay one event; returns by how many bytes it changes what is alive."""
    gone = live.pop(address, {"bytes": 0})["bytes"]
    if allocates:
        live[address] = _row(size, frames, "allocated")
    return size * allocates - gone


def _row(size: int, frames: list, kind: str) -> dict[str, Any]:
    """One allocation; its operation and its line are the innermost Python frame's, and the innermost outside torch."""
    python = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    op = str(python[0]["name"]) if python else "unknown"
    theirs = next((frame for frame in python if _TORCH not in str(frame["filename"])), None)
    line = f"{os.path.basename(str(theirs['filename']))}:{theirs['line']}" if theirs else ""
    return SavedTensor("", op, "", (size,), "uint8", size, line, kind).as_dict()
