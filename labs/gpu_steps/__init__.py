"""The steps of ``labs/measure_gpu.py``, one file each.

Every step measures one thing and returns plain values for the JSON.
"""
