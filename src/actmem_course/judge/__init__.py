"""The judge of the labs: it runs what a learner wrote, decides by what the code does, and names the mistake.

Read in this order: ``verdict`` (what comes out), ``exercise`` and ``exercises`` (what is asked, a file for each lab),
``outline`` (all labs), ``parent`` (starts the judge's process, follows it, ends it; loads no torch), ``worker`` (that
process), ``virtual`` (ranks as threads: mismatched collectives are reported and never hang), ``judging`` (one exercise
on all ranks), ``compare`` (are two tensors equal up to rounding?), ``saved_bytes`` (bytes saved for backward),
``real_ranks`` (the same cases under torchrun).

How an exercise is judged: its case (``cases``, a file for each lab) calls the learner's function and records
observations (``observations``, a class for each kind): results, gradients, saved bytes, collectives.  The same case
runs with our own solution, and the observations are compared.  If they differ, ``naming`` looks among the stated
mistakes (``exercises``), which are edits of our solution, for one that gives the learner's observations, and names it.
If there is none, the message describes the first wrong observation.  ``collective_outcomes`` explains wrong results of
collectives, ``term_tables`` wrong tables of bytes; ``hints.md`` has the hints.
"""

from actmem_course.judge.command import main

__all__ = ["main"]
