"""The same layer as others build it: same sizes, same arithmetic, their parallelism and recomputation.

Each peer is a function ``(shape, tp, recompute, p=, device=, dtype=) -> module`` whose module maps
plain ``[s, b, h]`` (``[s/t, b, h]`` under sequence parallelism) to the same, so that one
benchmark and one ledger serve them all.  If a peer isn't installed or can't run, it raises PeerUnavailable.
"""

from __future__ import annotations


class PeerUnavailable(RuntimeError):
    """This peer can't run here.  The message is one line that says why."""
