"""A thread on every rank that ends the rank when it can't go on, whatever its main thread is lost in.

A rank can't go on if it is told to end, if what started it is gone, or if another rank has failed.
Signals reach the thread through a pipe that C code fills, so it hears them even while the main
thread waits in a collective.  Of all ranks, one says what happened, in one line.

On one host the kernel says at once that a process has ended.  Between hosts nothing arrives any more, and a
rank that waits for another waits until the process group's time is over.  So every rank says twice a
second that it is there; rank 0 misses those that don't, and each rank misses the store if that is silent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from actmem_course.arguments import tell_torchrun
from actmem_course.launch import ENDING
from actmem_course.rank_store import RanksLost, RankStore

#: Between two looks at the others.
BEAT_SECONDS = 0.5
#: A rank that has not answered for so long, while others were still answering, is taken for dead.
ANSWER_SECONDS, LONGEST_SECONDS = 1.5, 5
#: Names the file descriptor by which ``start_ranks`` and a rank know of each other: it ends with either.
LINE = "ACTMEM_LINE"

_exit = os._exit  # a learner's code may meet another one


class Guard(threading.Thread):
    """Make and start it in the main thread, and ``stop`` it there."""

    #: The one that runs.
    current: Guard | None = None

    def __init__(self) -> None:
        super().__init__(name="guard", daemon=True)
        self.store, self.program = RankStore(), os.path.basename(sys.argv[0])
        #: Whether all ranks have been there.
        self.met = False
        self._over, self._giving_up = threading.Event(), threading.Lock()
        self._signs = Signs(self.quit)
        self._parent = os.getppid()
        self._to_start = [int(os.environ[LINE])] if LINE in os.environ else []
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)

    def start(self) -> None:
        if Guard.current:
            Guard.current.stop()
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in ENDING:
            signal.signal(number, lambda number, frame: None)
        Guard.current = self
        super().start()

    def stop(self) -> None:
        """No more watching; signals end the process again."""
        self._over.set()
        self._signs.stop()
        os.write(self._wake_end, b"\0")
        self.join()
        signal.set_wakeup_fd(-1)
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        Guard.current = None

    def run(self) -> None:
        while not self._over.is_set():
            ready = select.select([self._wake, *self._to_start], [], [], BEAT_SECONDS)[0]
            if self._over.is_set():
                return
            if any(line in ready for line in self._to_start) or not self._to_start and os.getppid() != self._parent:
                say_gone()
            try:
                if self._wake in ready:
                    self.signalled(os.read(self._wake, 1)[0])
                self.beat()
            except RanksLost:
                if not self._over.is_set():
                    self.lost()

    def signalled(self, number: int) -> None:
        """A signal has come."""
        if number == signal.SIGINT:
            time.sleep(1)  # time for KeyboardInterrupt to end the main thread by itself
            leave(130)
        if number in ENDING:
            self.give_up(None)

    def beat(self) -> None:
        """Twice a second: has another rank failed?"""
        if self.store.size > 1 and self.store.count("alarm", 0):
            self.give_up(None)
        if self.met and (silent := self._signs.exchange(self.store)):
            self.give_up(silent)

    def lost(self) -> None:
        """The store is gone, and with it what started the ranks."""
        time.sleep(BEAT_SECONDS)
        say_gone()

    def give_up(self, cause: str | None, echo: bool = False) -> NoReturn:
        """End this rank, and the others with it.  cause: None if it lies with another rank, or outside.

        echo: the cause is what an exchange says whose other side is gone.  It counts if no rank knows better.
        """
        self._giving_up.acquire()  # and never release it: the other thread waits here for the end
        speaks = cause is not None and not echo
        try:
            # Before the alarm: who hears it finds that somebody speaks, and blames nobody.
            speaks = speaks and self.store.count("spoken") == 1
            self.store.count("alarm")
            self.store.post("here", True)
            if echo or cause is None and not self._to_start:
                cause = self._blame(cause)
                speaks = cause is not None and self.store.count("spoken") == 1
            self.quit(cause if speaks else None)
        except RanksLost:
            if echo:  # what another rank said is gone with the store
                self.lost()
            self.quit(cause if speaks else None)

    def _blame(self, echo: str | None) -> str | None:
        """Who has failed, if nobody says so itself; ``echo`` if all are there."""
        missing = self.silent("here", until=lambda: self.store.count("spoken", 0) > 0)
        if self.store.count("spoken", 0):
            return None
        if missing and self.met:
            ranks = ", ".join(map(str, sorted(missing)))  # start knows itself what became of a rank
            return None if self._to_start else f"rank{'s' * (len(missing) > 1)} {ranks} died: killed, or crashed"
        return echo or ("told to end" if os.environ.get("RANK", "0") == "0" else None)

    def silent(self, key: str, until: Callable[[], bool] = lambda: False) -> set[int]:
        """The other ranks that don't say this word in time; the time starts anew with each that does."""
        missing, began = set(range(self.store.size)) - {self.store.rank}, time.monotonic()
        settled = began
        while missing and time.monotonic() - settled < ANSWER_SECONDS and time.monotonic() - began < LONGEST_SECONDS:
            if until():
                break
            still = {rank for rank in missing if not self.store.read_if_posted(key, rank)}
            if still != missing:
                missing, settled = still, time.monotonic()
            time.sleep(0.05)
        return missing

    def quit(self, cause: str | None) -> NoReturn:
        """End this process at once.  cause: what to say, on the rank that says it; the others end quietly."""
        if cause:
            by = f"rank {self.store.rank}: " * (self.store.size > 1)
            say(f"{self.program}: {by}{cause}")
            tell_torchrun(f"{by}{cause}")
        leave(1 if cause else 0)


def say(line: str) -> None:
    """A line for the user, whatever became of the streams."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


def say_gone() -> NoReturn:
    """End this rank because what started it is gone; the first rank of each host says so."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        leave(0)
    say(f"{os.path.basename(sys.argv[0])}: what started the ranks is gone")
    leave(1)


def leave(code: int) -> NoReturn:
    """End the process without the interpreter's own end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    _exit(code)


def done() -> None:
    """Tell ``start_ranks`` that this rank has come to its end, and has not been cut off."""
    if LINE in os.environ:
        with suppress(OSError):
            os.write(int(os.environ[LINE]), b".")


#: A rank whose thread has said nothing for so long is taken for gone.
ABSENT_SECONDS = 60


class Signs(threading.Thread):
    """This rank's signs to ranks on other hosts; it does nothing where all are on one.

    on_silence: called on this thread with what to say, on one rank of each host, or with None.  It ends the process.
    """

    def __init__(self, on_silence: Callable[[str | None], object]):
        super().__init__(name="signs", daemon=True)
        here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
        self.needed = here is not None and here != everywhere
        self.speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        self._here, self._on_silence = int(here or 1), on_silence
        self._over = threading.Event()
        self._count, self._answered = 0, 0.0
        self._heard: dict[int, tuple[int, float]] = {}

    def exchange(self, store: RankStore) -> str | None:
        """Say that this rank is there.  On rank 0: which rank has been silent for too long, in a sentence."""
        if not self.needed or store.size == 1:
            return None
        self._count += 1
        store.post("sign", self._count)
        silent = self._silent(store) if store.rank == 0 else None
        self._answered = time.monotonic()
        if not self.is_alive():
            self.start()
        return silent

    def _silent(self, store: RankStore) -> str | None:
        for rank in range(self._here, store.size):
            count, now = store.read_if_posted("sign", rank) or 0, time.monotonic()
            if rank not in self._heard or count != self._heard[rank][0]:
                self._heard[rank] = count, now
            elif now - self._heard[rank][1] > ABSENT_SECONDS:
                return f"no sign of rank {rank} for {ABSENT_SECONDS} s: its host, or the network to it, is gone"
        return None

    def run(self) -> None:
        while not self._over.wait(1):
            if time.monotonic() - self._answered > ABSENT_SECONDS:
                first = os.environ.get("MASTER_ADDR")
                text = f"no answer from {first} for {ABSENT_SECONDS} s: that host, or the network to it, is gone"
                self._on_silence(text if self.speaks else None)

    def stop(self) -> None:
        self._over.set()
