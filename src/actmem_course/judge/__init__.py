"""The judge of the labs: runs what a learner wrote, decides by its effects, names the mistake.

Read in this order: ``verdict`` (what comes out), ``exercise`` and ``outline`` (what is asked), ``parent`` (starts
processes, follows them, ends them; it loads no torch), ``worker`` (such a process), ``virtual`` (ranks as threads, in
which a mismatch is a sentence and nothing hangs), ``judging`` (one exercise on all ranks), ``workbench`` (what a check
works with; ``real``: on a rank that is a process), ``compare`` (which mistake makes these numbers?), ``kept`` (bytes).

Labs 2 and 3 are judged by cases (``case``: what an answer does; ``cases``: a file for each lab, with its table of
mistakes), and a mistake is an edit of our own answer (``edits``) that does what the learner's does (``naming``).
``exchanged`` says what can come of an exchange.  ``lab_checks`` has the checks of the other labs.  ``hints.md`` has the hints.
"""

from actmem_course.judge.command import main

__all__ = ["main"]
