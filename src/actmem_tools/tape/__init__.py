"""Tapes: which storages a training step allocates and frees, in order, with every size as a formula.

A tape is recorded from tiny real runs; its formulas then give memory and FLOPs at any sizes.
"""
