"""The parts of ``labs/measure_paper.py``: what the paper says beside ours (``sections``), and how it is printed (``tables``)."""
