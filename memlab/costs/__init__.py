"""Costs: what the operators of a recording allocate beside their outputs, and how long they take.

- `targets.py`: which of the rules below serve a CPU and which a card. Start here.
- On this CPU operators are run alone, once: `calibration.py` decides which, `run_alone.py` runs
  them, `overheads.py` finds what Python adds to each. `cost_store.py` keeps their costs on disk;
  `measured_runs.py` and `doubt.py` hold these against measured steps.
- On a card: `cuda_kernels.py` and `cudnn_workspace.py` for memory, `roofline.py` for time. To add a
  rule for a CUDA kernel, start with `cuda_kernels.py`.
- `host.py`: the time that Python takes.
"""
