"""The judge of the labs: runs what a learner wrote, decides by its effects, names the mistake.

Read in this order: ``verdict`` (what comes out), ``exercise`` (what is asked), ``rank_store``
(how ranks talk past the process group that is being judged), ``watch`` (every collective is announced
before it starts, so that a mismatch is a sentence and not a hang), ``workbench`` (what a check works
with), ``compare`` (which mistake makes these numbers?), ``kept`` (bytes), ``judging`` (the loop),
``watchdog`` (loops, dead ranks).  ``lab_checks`` has a file for each lab, ``catalogue`` finds them by name.
"""

from actmem_course.judge.command import main

__all__ = ["main"]
