"""Figures: the pictures that `memlab.plots` lists, one file each. No torch, no widgets.

- Of one run: `timeline.py` (memory over one step), `peak_bar.py` and `peak_map.py` (its peak).
- Of several runs: `step_times.py`, `memory_against_time.py`, `heat_map.py`; `runs.py` is what these
  share. `scaling.py`: the same step with ever more ranks. `recommendations.py`: what
  `memlab.recommend` has looked at; `dots.py` is what it and the picture of memory against time
  share. `ladder.py`: techniques that are switched on one by one.
- Of a memory snapshot: `snapshot_timeline.py`, `snapshot_peak.py`, `snapshot_fragmentation.py`,
  `snapshot_growth.py`; and of one beside a prediction: `snapshot_comparison.py`.
- `look.py`: colours, fonts, and figures as SVG or PNG. `areas.py`: what timelines draw with.

Results come in, matplotlib figures go out. Start with `peak_bar.py`.
"""
