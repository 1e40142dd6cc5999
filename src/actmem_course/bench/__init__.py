"""The bodies of ``labs/measure_*.py``, one file each, and what they share."""
