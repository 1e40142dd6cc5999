"""The steps of ``labs/measure_gpu.py``, one file each: a step measures one thing and returns plain values."""
