"""The parts of ``labs/measure_paper.py``.

``sections``: the paper's numbers beside ours, predicted and measured.  ``tables``: the tables that are printed.
"""
