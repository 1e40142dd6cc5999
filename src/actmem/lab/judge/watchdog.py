"""A thread on every rank that ends the judging when a rank loops, waits for ever, or dies.

Each rank says twice a second where it is.  Rank 0 hears it; when an exercise takes too long, or a
rank falls silent, it makes that a verdict, prints it, and ends its process, upon which torchrun
ends the others.  The thread reads signals from a pipe that C code fills, so it hears torchrun's
"end" even while the main thread is lost in a collective.
"""

from __future__ import annotations

import faulthandler
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from actmem.lab.judge.exercise import Exercise
from actmem.lab.judge.together import RanksLost, Together
from actmem.lab.judge.verdict import WRONG, Verdict
from actmem.lab.judge.watch import Place

#: Between two words of a rank, and how long a silent rank is waited for.
BEAT_SECONDS, SILENT_SECONDS = 0.5, 12
#: If not even the watchdog runs for so long (C code that never lets go of Python), faulthandler ends the process.
LAST_RESORT_SECONDS = 50


class Watchdog(threading.Thread):
    """Start it before judging and ``stop`` it after.  on_stuck: called with the verdict; the process ends after it."""

    def __init__(self, together: Together, place: Place, on_stuck: Callable[[Verdict], None]):
        super().__init__(name="watchdog", daemon=True)
        self._together, self._place, self._on_stuck = together, place, on_stuck
        self._exercise: Exercise | None = None
        self._since = 0.0
        self._over = threading.Event()
        self._dump = tempfile.TemporaryFile()
        self._heard = {rank: (0, time.monotonic()) for rank in range(together.size)}
        self._count = 0
        self._wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def begin(self, exercise: Exercise) -> None:
        """From now on this exercise's time counts."""
        self._exercise, self._since = exercise, time.monotonic()

    def progress(self) -> None:
        """Start the time of the exercise anew: it is long, and known to move on."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Nothing of the learner's runs now."""
        self._exercise = None

    def stop(self) -> None:
        """No more watching; SIGTERM ends the process again."""
        self._over.set()
        self.join()
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def run(self) -> None:
        while not self._over.is_set():
            faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True)
            if select.select([self._wake], [], [], BEAT_SECONDS)[0]:
                self._signalled(os.read(self._wake, 1)[0])
            try:
                self._beat()
            except RanksLost:
                if not self._over.is_set():
                    self._leader_lost()

    def _beat(self) -> None:
        self._count += 1
        self._together.post("beat", (self._count, self.where(), self._place.exercise))
        if self._together.rank == 0:
            self._look()
        elif self._together.heard("over", 0):
            os._exit(0)  # rank 0 has said why, and ends with the exit code

    def where(self) -> str:
        """Where this rank's main thread is, to follow "rank 1" in a sentence."""
        line = self._line()
        if self._place.collective:
            return f"is waiting in {self._place.collective}" + (f" ({line.split(',')[0]})" if line else "")
        return f"is at {line}" if line else "is in none of your functions" if self._exercise else "is between two exercises"

    def _line(self) -> str:
        """The learner's innermost line on any thread.

        From faulthandler's text, and not from frame objects: those would keep alive the tensors
        that their functions have in hand, under the eyes of the census.
        """
        self._dump.seek(0)
        self._dump.truncate()
        faulthandler.dump_traceback(self._dump, all_threads=True)
        self._dump.seek(0)
        file = re.escape(self._place.file.encode("ascii", "backslashreplace").decode())
        found = re.search(rf'File "{file}", line (\d+) in (\S+)', self._dump.read().decode("ascii", "replace"))
        return f"{os.path.basename(self._place.file)}:{found[1]}, in {found[2]}" if found else ""

    def _look(self) -> None:
        now = time.monotonic()
        for rank in range(1, self._together.size):
            beat = self._together.heard("beat", rank)
            if beat and beat[0] != self._heard[rank][0]:
                self._heard[rank] = (beat[0], now)
            elif now - self._heard[rank][1] > SILENT_SECONDS and beat:
                self._end(f"rank {rank} has gone silent{self._last(beat)}")
        if self._exercise and now - self._since > self._exercise.seconds:
            self._end(f"no end after {self._exercise.seconds} s: {self._everywhere()}")

    def _everywhere(self) -> str:
        places = [self.where()] + [(self._together.heard("beat", r) or (0, "has not begun", ""))[1] for r in range(1, self._together.size)]
        return "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))

    def _signalled(self, number: int) -> None:
        if number == signal.SIGINT:
            time.sleep(1)  # time for KeyboardInterrupt to end the main thread by itself
            os._exit(130)
        if number != signal.SIGTERM:
            return
        if self._together.rank:
            try:
                self._together.post("ended", True)
                self._together.heard("ended", self._together.rank)  # an answer shows that rank 0 lives
                time.sleep(1)
            except RanksLost:
                self._leader_lost()
            os._exit(1)
        deadline = time.monotonic() + 2
        missing = set(range(1, self._together.size))
        while missing and time.monotonic() < deadline:
            missing -= {rank for rank in missing if self._together.heard("ended", rank)}
            time.sleep(0.05)
        if not missing:
            os._exit(1)  # ended from outside, all together
        rank = min(missing)
        beat = self._together.heard("beat", rank)
        self._end(f"rank {rank} died{self._last(beat)}")

    def _leader_lost(self) -> None:
        if self._together.rank == 1:
            self._end("rank 0 died")
        time.sleep(2)
        os._exit(1)

    def _last(self, beat: tuple[int, str, str] | None) -> str:
        """Where a rank was when it last said so, if that was in this exercise."""
        if not beat or not self._exercise or beat[2] != self._exercise.number or " at " not in beat[1]:
            return ""
        return f"; shortly before, it {beat[1].replace('is ', 'was ', 1)}"

    def _end(self, diagnosis: str) -> None:
        exercise = self._exercise
        number, function = (exercise.number, exercise.function) if exercise else ("", "")
        self._on_stuck(Verdict(number, function, WRONG, diagnosis))
        sys.stdout.flush()
        if self._together.rank == 0:
            self._together.post("over", True)
            time.sleep(2 * BEAT_SECONDS)  # until the others have heard it
        os._exit(1)
