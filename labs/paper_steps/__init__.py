"""The parts of ``labs/measure_paper.py``.

``sections``: what the paper says beside ours.  ``tables``: how it is printed.
"""
