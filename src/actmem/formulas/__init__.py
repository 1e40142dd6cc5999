"""Predictions, in whole bytes and exact integers.  Nothing in this folder needs torch."""
