"""Take away what hides communication, to see how much it hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from actmem.measure.replace import replaced
from actmem.parallel import linear

_STARTED = ("start_all_gather", "start_reduce_scatter", "start_all_reduce")


@contextmanager
def without_overlap() -> Iterator[None]:
    """In the block, backward of the column-parallel linears waits for each exchange as soon as it has started it.

    The same exchanges and the same products in the same order; only nothing runs beside anything.
    """
    with ExitStack() as stack:
        for name in _STARTED:
            stack.enter_context(replaced(linear, name, _waiting))
        yield


def _waiting(start: Callable) -> Callable:
    def start_and_wait(x, tp):
        pending = start(x, tp)
        pending.wait()
        return pending

    return start_and_wait
