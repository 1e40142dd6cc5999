"""The line between the judge's parent and a rank: a JSON object a line, over a pair of sockets.  Loads no torch."""

from __future__ import annotations

import json
import socket
from typing import Any

#: The file descriptors of a rank's line, of its trace, and of what rank 0 listens on, by name in the environment.
RANKS_LINE, RANKS_TRACE, RANKS_STORE = "ACTMEM_RANKS_LINE", "ACTMEM_RANKS_TRACE", "ACTMEM_RANKS_STORE"


class Channel:
    """One end of the line.  Whoever reads gets whole objects, in order."""

    def __init__(self, line: socket.socket):
        self.line, self._rest = line, b""

    def send(self, **message: Any) -> None:
        """Send one object.  Raises OSError if the other end is gone."""
        self.line.sendall(json.dumps(message, ensure_ascii=False).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come, waiting for something; None at the end."""
        try:
            read = self.line.recv(1 << 16)
        except ConnectionError:
            read = b""
        if not read:
            return None
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [json.loads(line) for line in lines]
