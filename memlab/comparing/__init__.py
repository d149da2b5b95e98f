"""Comparing: one workload under several settings.

- `ladder.py`: `memlab.ladder`, one technique after another, each on top of those before it.
- `batches.py`: `memlab.predict_batches`, one prediction for many batch sizes.
- `quantized_base.py`: `memlab.compare_base`, a quantized base beside one of 16 bits.
- `pairs.py`: `memlab.compare_recompute`, the largest batch that fits, without recompute and with
  it, from the command line too.
"""
