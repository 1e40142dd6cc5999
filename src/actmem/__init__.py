"""The activation memory of 2205.05198: predicted by formula (without torch), counted in any model by ``record`` and ``step``."""

__version__ = "0.1.0"


def __getattr__(name):
    if name in ("record", "step", "watch_step", "census"):
        from actmem import measure  # needs torch

        return getattr(measure, name)
    raise AttributeError(f"module 'actmem' has no attribute {name!r}")
