"""The judge of the labs: it runs what a learner wrote, decides by what the code does, and names the mistake.

Read in this order: ``verdict`` (what comes out), ``exercise`` and ``exercises`` (what is asked, a file for each lab),
``outline`` (all labs), ``parent`` (starts the judge's process, follows it, ends it; loads no torch), ``worker`` (that
process), ``virtual`` (ranks as threads: a mismatch is a sentence and nothing hangs), ``judging`` (one exercise on all
ranks), ``compare`` (equal up to rounding, or how not), ``saved_bytes``, ``real_ranks`` (the same cases under torchrun).

An exercise is judged by a case (``case``: what an answer does; ``cases``: a file for each lab).  ``observations`` has a
class for each kind of thing that is compared.  ``exercises`` states mistakes, each as an edit of our solution, and
``naming`` finds the one that does what the learner's answer does; what none does is described by its observation.
``collective_outcomes`` has the results a collective can have, ``term_tables`` tables of bytes, ``hints.md`` the hints.
"""

from actmem_course.judge.command import main

__all__ = ["main"]
