"""Figures: the pictures that `memlab.plots` lists. No torch, no widgets.

Results come in, matplotlib figures go out. Start with `look.py`: `Picture`, its axes, colours and
names of categories, and figures as SVG or PNG. `timeline.py`: memory over one step. `peak.py`: the
peak of one run as a bar and a map, and that of each rank. `runs.py`: several runs. `searches.py`:
answers of a search. `snapshots.py`: memory snapshots. `step_graph.py`: a graph.
"""
