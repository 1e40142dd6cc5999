"""Replace a function while a block runs: to time it, to name it, to change its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable], object]) -> Iterator[None]:
    """Replace ``owner.name`` by ``make(original)`` while the block runs.

    owner: a module or a class; a static method stays one.
    """
    original = vars(owner)[name]
    if isinstance(original, staticmethod):
        function: Any = make(original.__func__)
        new: object = staticmethod(function)
    else:
        new = make(original)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, original)
