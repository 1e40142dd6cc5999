"""Switch off the overlap of communication and computation, to see what it hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from actmem.measure.tools import replaced
from actmem.parallel import linear

_STARTED = ("start_all_gather", "start_reduce_scatter", "start_all_reduce")


@contextmanager
def without_overlap() -> Iterator[None]:
    """In the block, backward of the column-parallel linears waits for each collective right after starting it.

    The same collectives and products run in the same order, but nothing overlaps.
    """
    with ExitStack() as stack:
        for name in _STARTED:
            stack.enter_context(replaced(linear, name, _waiting))
        yield


def _waiting(start: Callable) -> Callable:
    def start_and_wait(x, tp, **options):
        pending = start(x, tp, **options)
        pending.wait()
        return pending

    return start_and_wait
