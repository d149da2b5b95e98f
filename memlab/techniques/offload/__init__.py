"""Offloading: tensors that are kept in host memory until the device needs them.

- `offload.py`: the three techniques. Start here.
- `offloading.py`: how activations, the optimizer's state and weights go and come.
"""
