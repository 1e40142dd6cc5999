"""Where every thread is, read from another thread without a trace.

faulthandler would walk the states of C threads (gloo's, autograd's) while they come and go, and
reading one that is gone crashes.  A frame that Python code holds keeps the tensors of its function
alive under the eyes of the census.  So all is read in one call that runs in C: Python doesn't
switch threads meanwhile, and the frames are dropped before it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, chain, repeat, starmap, takewhile
from operator import attrgetter, is_not
from typing import Any

_PLACE = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


def places() -> list[tuple[str, int, str]]:
    """File, line and function of every Python frame: thread by thread, the innermost first."""
    # Iterators only, so nothing runs before list() does.  A stack is frame, frame.f_back, and so on until None.
    frames = chain.from_iterable(map(dict.values, starmap(sys._current_frames, [()])))
    stacks: Iterator[Any] = map(
        accumulate, map(chain, map(repeat, frames, repeat(1)), repeat(repeat("f_back"))), repeat(getattr)
    )
    stacks = map(takewhile, repeat(partial(is_not, None)), stacks)
    return list(map(_PLACE, chain.from_iterable(stacks)))
