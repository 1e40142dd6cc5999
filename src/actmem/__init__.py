"""The activation memory of 2205.05198: predicted by formula, and counted in a real layer.

``import actmem`` loads nothing else.  The predictions (config, rows, models, formulas) and
``show`` work without torch; parallel, model and measure need it.
"""

__version__ = "0.1.0"
