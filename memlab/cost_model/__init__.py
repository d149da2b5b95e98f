"""What operators cost: seconds, and the memory that they take beside their outputs.

- `traced_step.py` traces a step for a CPU or a card, with the memory and time of its kernels.
  Start here. `targets.py` decides which of the files below are used.
- For a CPU, operators are run alone, once: `calibration.py`, which also finds what Python adds.
  `cost_store.py` caches the costs on disk, `measured_runs.py` compares them with measured steps.
- For a card, `cuda_kernels.py` has rules for memory and `roofline.py` for time, with the factors of
  `kernel_times.json`; `batch_norm.py` has what is particular to batch norm; `power.py` says what a
  card draws and what a power limit costs. To add a rule for a CUDA kernel, start with
  `cuda_kernels.py`.
- `links.py`: collectives between cards; `overlap.py`: operators on several streams, what a card
  waits for its host, and the time that Python takes for a recompute.
"""
