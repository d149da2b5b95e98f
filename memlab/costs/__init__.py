"""Costs: the memory that operators allocate in addition to their outputs, and their time.

- `recorded_step.py` records a step for a CPU or a card, with the memory and time of its kernels.
  Predictions and plans begin with it. Start here.
- `targets.py` decides which of the files below are used for a CPU and for a card.
- For a CPU, operators are run alone, once: `calibration.py` decides which, `run_alone.py` runs
  them, and `overheads.py` finds what Python adds to each. `cost_store.py` caches the costs on disk;
  `measured_runs.py` and `doubt.py` compare them with measured steps.
- For a card, `cuda_kernels.py` and `cudnn_workspace.py` have rules for memory, and `roofline.py`
  for time: `kernel_parts.py` says what the kernels of an operator do, `kernel_times.py` how long
  that takes, with the factors of `kernel_times.json`. To add a rule for a CUDA kernel, start with
  `cuda_kernels.py`.
- `links.py`: how long collectives take between the cards of a cluster; `overlap.py`: how long a
  step takes whose operators run on several streams.
- `host.py` estimates the time that Python takes.
"""
