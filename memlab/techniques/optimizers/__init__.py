"""Optimizers, and changes to how they update.

- `optimizers.py` makes optimizers by name. To add one, start here.
- `optimizer_in_backward.py` updates each parameter, and frees its gradient, during backward.
- `master_weights.py` and `stochastic_rounding.py` keep small updates of bf16 weights.
"""
