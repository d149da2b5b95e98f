"""Search: which settings fit, which is fastest, and why.

- `recommend.py`: `memlab.recommend`. Start here. `search.py` decides what is predicted in which
  order, for a `goal.py`, `alternatives.py` what one prediction says of others, `recommendations.py`
  is the answer, which `answer.py` puts into words.
- `largest_batch.py`, `compare_batches.py`, `ladder.py`, `sweep.py`: several settings, the last in
  tasks of their own (`sweep_tasks.py`).
- `explain.py`: what holds a peak and what would lower it; `holdings.py`: by repeated block.
- `graph_of_step.py`: `memlab.graph_table`.
- `quantized_base.py`: what a quantized base saves and costs.
- `lengths.py`: samples of many lengths, by `length_curve.py`.
"""
