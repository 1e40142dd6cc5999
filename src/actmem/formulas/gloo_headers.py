"""What gloo sends besides the data: the headers of its messages.

torch's CPU backend splits a tensor into pieces and sends them as messages, each with a header of
six 8-byte numbers.  So the bytes that a rank's sockets send can be predicted exactly.
"""

from __future__ import annotations

from actmem.checks import checked
from actmem.formulas.communication import Exchange

#: Before each message: length, kind, slot, and where in which buffer.
HEADER_BYTES = 6 * 8
#: For each piece that goes to another rank: "I have it", "I am ready for it", and the piece itself.
MESSAGES = 3
#: An all-reduce splits its tensor into pieces of at most this size, at least two for each rank.
PIECE_BYTES = 1 << 20


@checked
def gloo_header_bytes(exchange: Exchange) -> int:
    """Bytes that one rank sends besides the data of ``exchange``.

    all-reduce: a ring's 2(t - 1) turns, with 1/t of the pieces each.  all-gather: t - 1 turns with two
    pieces each.  reduce-scatter: a piece to each other rank, as ``parallel.collectives`` makes it; gloo has none.
    """
    t = exchange.ranks
    pieces_of_each = max(2, -(-exchange.payload_bytes // (t * PIECE_BYTES)))
    sent = {"all-reduce": 2 * (t - 1) * pieces_of_each, "all-gather": 2 * (t - 1), "reduce-scatter": t - 1}[
        exchange.kind
    ]
    return exchange.count * sent * MESSAGES * HEADER_BYTES
