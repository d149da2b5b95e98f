"""Comparing: one workload under several settings.

- `ladder.py`: `memlab.ladder`, one technique after another, each on top of those before it.
- `pairs.py`: a model as it is and with recompute, from the command line: the largest batch of each.
"""
