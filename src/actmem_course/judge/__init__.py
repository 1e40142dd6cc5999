"""The judge of the labs: runs what a learner wrote, decides by its effects, names the mistake.

Read in this order: ``verdict`` (what comes out), ``exercise`` and ``outline`` (what is asked), ``parent``
(starts ranks, follows them, ends them; it loads no torch), ``worker`` (a rank), ``judging`` (the loop),
``rank_store`` (how ranks talk past the process group that is being judged), ``watch`` (every collective is
announced before it starts, so that a mismatch is a sentence and not a hang), ``workbench`` (what a check works
with), ``compare`` (which mistake makes these numbers?), ``kept`` (bytes).  ``lab_checks`` has files for each
lab; in it, ``exchanged`` and ``mutations`` make the hypotheses.  ``hints.md`` has the hints.
"""

from actmem_course.judge.command import main

__all__ = ["main"]
