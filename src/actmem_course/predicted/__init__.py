"""Predictions that chapters need in addition to the paper's formulas. They need neither torch nor numpy."""
