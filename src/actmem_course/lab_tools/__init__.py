"""Helpers that the measuring labs share.  The measurements are in the labs themselves.

``options`` adds the options that several labs have; ``output`` prints and writes on rank 0; ``tables`` makes a table;
``machine`` knows this machine's memory and names; ``timing`` times candidates in turns; ``held_bytes`` counts what a
module holds between forward and backward; ``trace`` records a profiler trace.
"""
