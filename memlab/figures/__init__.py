"""Figures: the pictures that `memlab.plots` lists. No torch, no widgets.

Results come in, matplotlib figures go out. Start with `peak.py`: the peak of one run as a bar and a
map. `timeline.py`: memory over one step. `runs.py`: several runs. `ranks.py`: several ranks.
`searches.py`: answers of a search. `snapshots.py`: memory snapshots. `step_graph.py`: a graph.
`look.py`: colours, fonts, names of categories, and figures as SVG or PNG.
"""
