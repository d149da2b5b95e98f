"""Optimizers, and changes to how they update.

- `optimizers.py`: by name, with PyTorch's defaults; `own.py`: what a person's function makes.
- `optimizer_in_backward.py`: each gradient is used and freed as soon as it is computed.
- `weight_formats.py`: bf16 weights with fp32 masters, or rounded at random.
"""
