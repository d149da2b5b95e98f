"""Optimizers, and what takes their place or their weights.

- `optimizers.py`: optimizers by name. To add one, start here.
- `optimizer_in_backward.py`: each gradient is used and freed in backward.
- `master_weights.py`, `stochastic_rounding.py`: bf16 weights whose small updates are not lost.
"""
