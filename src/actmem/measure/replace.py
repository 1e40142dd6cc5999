"""Put something else in a function's place while a block runs: to time it, to name it, to change its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Let ``owner.name`` be ``make(the function it was)`` while the block runs.

    owner: a module or a class; a static method stays one.
    """
    original = vars(owner)[name]
    if isinstance(original, staticmethod):
        new: object = staticmethod(make(original.__func__))
    else:
        new = make(original)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, original)
