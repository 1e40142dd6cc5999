"""Predictions that chapters need besides the paper's own, for figures and checks. Needs neither torch nor numpy."""
