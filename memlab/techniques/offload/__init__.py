"""Offloading: what waits in the host's memory.

- `offload.py`: what refuses it, and what it says of itself. Start here.
- `offloading.py`: activations and the optimizer's state.
- `weight_offloading.py`: weights; `weight_reads.py`: who reads a weight.
"""
