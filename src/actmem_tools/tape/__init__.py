"""Tapes: what a step makes and frees, recorded from tiny real runs, solved as formulas, read at any sizes."""
