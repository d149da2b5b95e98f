"""Offloading: tensors that are kept in host memory until the device needs them.

- `offload.py` has the techniques: their refusals, notes and lines in a script. Start here.
- `offloading.py` offloads activations and the optimizer's state.
- `weight_offloading.py` offloads weights; `weight_reads.py` detects who reads a weight.
"""
