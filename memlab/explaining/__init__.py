"""Explaining: what holds the peak of a result, and what would lower it. Nothing is run.

- `explain.py`: `memlab.explain`. Start here.
- `holdings.py`: what holds the peak, by repeated block; `logits.py`: what logits hold.
- `remedies.py`: settings that would lower the peak, and by how much.
"""
