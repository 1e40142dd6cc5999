"""Predictions of the chapters beside the paper's own, for figures and checks.  Needs neither torch nor numpy."""
