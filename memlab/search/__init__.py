"""Search: which settings fit, which is fastest, and why.

- `recommend.py`: `memlab.recommend`. Start here. `search.py` decides what is predicted in which
  order, `alternatives.py` what may be changed and what one prediction says of the rest of it;
  `answer.py` is the answer, in words.
- `largest_batch.py`, `ladder.py`, `sweep.py`: several settings.
- `explain.py`: what holds a peak and what would lower it; `holdings.py`: by repeated block.
- `graph_of_step.py`: `memlab.graph_table`.
- `quantized_base.py`: what a quantized base saves and costs.
- `lengths.py`: samples of many lengths, by `length_curve.py`.

What lowers a peak, and at what price, is said by the catalogue of `memlab/techniques`.
"""
