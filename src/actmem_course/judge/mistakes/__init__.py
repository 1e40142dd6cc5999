"""Mistakes by exercise, each an edit of our solution."""
