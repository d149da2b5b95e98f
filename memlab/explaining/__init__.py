"""Explaining: what holds the peak of a result, what would lower it, and what each node costs.

- `explain.py`: `memlab.explain`. Start here.
- `holdings.py`: what holds the peak, by repeated block; `logits.py`: what logits hold.
- `remedies.py`: settings that would lower the peak, and by how much.
- `graph_of_step.py`: `memlab.graph_table`, from the worker for predictions.
"""
