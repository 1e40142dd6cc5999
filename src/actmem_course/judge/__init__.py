"""The judge of the labs: runs what a learner wrote, decides by its effects, names the mistake.

Read in this order: ``verdict`` (what comes out), ``exercise`` and ``outline`` (what is asked), ``parent`` (starts
processes, follows them, ends them; it loads no torch), ``worker`` (such a process), ``virtual`` (ranks as threads, in
which a mismatch is a sentence and nothing hangs), ``judging`` (one exercise on all ranks), ``workbench`` (what a check
works with; ``real``: on a rank that is a process), ``compare`` (which mistake makes these numbers?), ``kept`` (bytes).
``lab_checks`` has files for each lab; in it, ``exchanged`` and ``mutations`` make the hypotheses.  ``hints.md`` has the
hints.
"""

from actmem_course.judge.command import main

__all__ = ["main"]
