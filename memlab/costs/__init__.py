"""Costs: what the operators of a recording allocate beside their outputs, and how long they take.

- `recorded_step.py`: a step recorded for a CPU or a card, with what its kernels do there: what
  predictions and plans begin with. Start here.
- `targets.py`: which of the rules below serve a CPU and which a card.
- On this CPU operators are run alone, once: `calibration.py`; their costs are kept on disk by
  `cost_store.py`, and held against measured steps by `measured_runs.py` and `doubt.py`.
- On a card: `cuda_kernels.py` and `cudnn_workspace.py` for memory, `roofline.py` for time. To add a
  rule for a CUDA kernel, start with `cuda_kernels.py`.
- `host.py`: the time that Python takes.
"""
