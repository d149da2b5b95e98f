"""Comparing: one workload under several settings.

- `ladder.py`: `memlab.ladder`, one technique after another, each on top of those before it.
- `pairs.py`: the largest batch that fits, without recompute and with it, from the command line.
"""
