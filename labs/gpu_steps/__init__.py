"""The measurements of ``labs/measure_gpu.py``, one file each.

Each returns a dict of plain values for the JSON file.
"""
