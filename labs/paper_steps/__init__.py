"""Of ``labs/measure_paper.py``: what the paper says beside ours (``sections``), its tables (``tables``)."""
