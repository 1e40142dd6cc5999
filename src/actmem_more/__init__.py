"""Layers, losses and stores since the paper: ``actmem`` grown by what it left open."""
