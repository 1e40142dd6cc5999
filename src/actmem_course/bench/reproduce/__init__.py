"""What labs/measure_paper.py does: the paper's numbers and ours, by formula and measured."""
