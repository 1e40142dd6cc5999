"""A thread on every rank that ends the judging when a rank loops, waits for ever, or dies.

Each rank says twice a second where it is.  Rank 0 hears it; when an exercise takes too long, or a
rank falls silent, it makes that a verdict, prints it, and ends all ranks.  When a rank dies, what
started it tells the others to end, and the first of them says so in a verdict.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from actmem_course.guard import LONGEST_SECONDS, Guard, leave
from actmem_course.judge.exercise import Exercise
from actmem_course.judge.frames import places
from actmem_course.judge.verdict import WRONG, Verdict
from actmem_course.judge.watch import Place
from actmem_course.rank_store import RankStore

#: How long a silent rank is waited for.
SILENT_SECONDS = 12
#: If not even the watchdog runs for so long (C code that never lets go of Python), the kernel ends the process.
LAST_RESORT_SECONDS = 50


class Watchdog(Guard):
    """Start it before judging and ``stop`` it after.  on_stuck: called with the verdict; the process ends after it."""

    def __init__(self, store: RankStore, place: Place, on_stuck: Callable[[Verdict], None]):
        super().__init__(store)
        self._place, self._on_stuck = place, on_stuck
        self._exercise: Exercise | None = None
        self._since = 0.0
        self._heard = {rank: (0, time.monotonic()) for rank in range(store.size)}
        self._count = 0

    def begin(self, exercise: Exercise) -> None:
        """From now on this exercise's time counts."""
        self._exercise, self._since = exercise, time.monotonic()

    def progress(self) -> None:
        """Start the time of the exercise anew: it is long, and known to move on."""
        self._since = time.monotonic()

    def idle(self) -> None:
        """Nothing of the learner's runs now."""
        self._exercise = None

    def stop(self) -> None:
        """No more watching; signals end the process again."""
        super().stop()
        _last_resort(0)

    def beat(self) -> None:
        """Say where this rank is; on rank 0, look at the others."""
        _last_resort(LAST_RESORT_SECONDS)
        super().beat()
        self._count += 1
        self.store.post("beat", (self._count, self.where(), self._place.exercise))
        if self._told():
            leave(0)
        if self.store.rank == 0:
            self._look()

    def signalled(self, number: int) -> None:
        """Told to end: by a person, all ranks; by what started them, those that are left when one has died."""
        if number == signal.SIGINT or self.store.size == 1:
            return super().signalled(number)
        self.store.post("ended", True)
        missing = self.silent("ended", until=self._told)
        if self._told():
            leave(0)
        if not missing:
            leave(1)
        if self.store.rank == min(set(range(self.store.size)) - missing):
            rank = min(missing)
            self._end(f"rank {rank} died{self._last(self.store.read_if_posted('beat', rank))}")
        deadline = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < deadline and not self._told():
            time.sleep(0.05)
        leave(0)  # the rank that says it ends with the exit code

    def where(self) -> str:
        """Where this rank's main thread is, to follow "rank 1" in a sentence."""
        line = self._line()
        if self._place.collective:
            return f"is waiting in {self._place.collective}" + (f" ({line.split(',')[0]})" if line else "")
        return (
            f"is at {line}"
            if line
            else "is in none of your functions"
            if self._exercise
            else "is between two exercises"
        )

    def _line(self) -> str:
        """The learner's innermost line on any thread."""
        own = next((place for place in places() if place[0] == self._place.file), None)
        return f"{os.path.basename(own[0])}:{own[1]}, in {own[2]}" if own else ""

    def _look(self) -> None:
        now = time.monotonic()
        for rank in range(1, self.store.size):
            beat = self.store.read_if_posted("beat", rank)
            if beat and beat[0] != self._heard[rank][0]:
                self._heard[rank] = (beat[0], now)
            elif now - self._heard[rank][1] > SILENT_SECONDS and beat:
                self._end(f"rank {rank} has gone silent{self._last(beat)}")
        if self._exercise and now - self._since > self._exercise.seconds:
            self._end(f"no end after {self._exercise.seconds} s: {self._everywhere()}")

    def _everywhere(self) -> str:
        places = [self.where()] + [
            (self.store.read_if_posted("beat", r) or (0, "has not begun", ""))[1] for r in range(1, self.store.size)
        ]
        return "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))

    def _last(self, beat: tuple[int, str, str] | None) -> str:
        """Where a rank was when it last said so, if that was in this exercise."""
        if not beat or not self._exercise or beat[2] != self._exercise.number or " at " not in beat[1]:
            return ""
        return f"; shortly before, it {beat[1].replace('is ', 'was ', 1)}"

    def _told(self) -> bool:
        """Whether a rank has said what happened.  It ends with the exit code, the others with 0."""
        return self.store.size > 1 and self.store.count("over", 0) > 0

    def _end(self, diagnosis: str) -> None:
        if self.store.count("over") > 1:
            leave(0)
        exercise = self._exercise
        number, function = (exercise.number, exercise.function) if exercise else ("", "")
        self._on_stuck(Verdict(number, function, WRONG, diagnosis))
        leave(1)


def _last_resort(seconds: float) -> None:
    """SIGALRM, with no handler, ends the process after ``seconds``; 0 takes it back.  Nothing on Windows."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
