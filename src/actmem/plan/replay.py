"""Bytes alive while operations make and free tensors, and the moment at which they are most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from actmem.rows import Row


class Replay:
    """Tensors by name.  kept: what is there when it begins; freeing it counts as negative bytes at the fullest moment."""

    def __init__(self, kept: Iterable[Row]):
        self._alive: dict[str, int] = {}
        for row in kept:
            self._alive[row.term] = self._alive.get(row.term, 0) + row.bytes
        self._kept = dict(self._alive)
        self._bytes = self._begun = sum(self._alive.values())
        self._most, self._at_most = self._bytes, dict(self._alive)

    def make(self, name: str, size: int) -> None:
        """A new tensor; of the same name as another one, both are freed together."""
        self._alive[name] = self._alive.get(name, 0) + size
        self._bytes += size
        if self._bytes > self._most:
            self._most, self._at_most = self._bytes, dict(self._alive)

    def free(self, *names: str) -> None:
        """Tensors that nothing reads any more."""
        for name in names:
            self._bytes -= self._alive.pop(name)

    def rename(self, name: str, new_name: str) -> None:
        """The same tensor under another name."""
        self._alive[new_name] = self._alive.pop(name)

    def pass_by(self, name: str, size: int) -> None:
        """A tensor that is freed before the next one is made."""
        self.make(name, size)
        self.free(name)

    def go_through(self, moments: Iterable[Mapping[str, int]], own: Collection[str]) -> None:
        """Moments that are known as a whole: what was alive at each.  own: the names of now that they have or free themselves."""
        others = {name: size for name, size in self._alive.items() if name not in own}
        for moment in moments:
            size = sum(others.values()) + sum(moment.values())
            if size > self._most:
                self._most, self._at_most = size, {**moment, **others}

    @property
    def transient_bytes(self) -> int:
        """What the fullest moment holds beyond what was there at the beginning."""
        return self._most - self._begun

    def transient_rows(self) -> list[Row]:
        """The same, line by line: what was made by then, and less what was freed."""
        made = [
            Row(name, size - self._kept.get(name, 0), source="made in backward")
            for name, size in self._at_most.items()
            if size > self._kept.get(name, 0)
        ]
        gone = sum(
            size - self._at_most.get(name, 0) for name, size in self._kept.items() if size > self._at_most.get(name, 0)
        )
        return made + ([Row("kept, freed by then", -gone, source="backward is done with it")] if gone else [])
