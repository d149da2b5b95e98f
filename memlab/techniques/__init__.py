"""Techniques, one file each; `memlab.step` applies them in the order in which they must apply."""
