"""The judge of the labs: runs what a learner wrote, decides by its effects, names the mistake.

Read in this order: ``verdict`` (what comes out), ``exercise`` (what is asked), ``together`` (how
ranks talk past the process group that is being judged), ``watch`` (every collective is announced
before it starts, so that a mismatch is a sentence and not a hang), ``bench`` (what a check has
in its hands), ``compare`` (which mistake makes these numbers?), ``kept`` (bytes), ``judging``
(the loop), ``watchdog`` (loops, dead ranks).  ``checks`` has a file for each lab.
"""

from actmem.lab.judge.command import main

__all__ = ["main"]
