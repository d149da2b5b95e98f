"""Figures: the pictures behind `memlab.plots`, one file each. No torch, no widgets.

- `look.py`: colours, fonts, and figures as SVG or PNG.
- `timeline.py`, `peak_map.py`, `ladder.py`: the pictures that need more than a few lines.
"""
