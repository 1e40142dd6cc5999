"""What labs/measure_paper.py does: every number of the paper, ours, and the two measured."""
