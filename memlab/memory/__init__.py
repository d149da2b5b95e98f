"""Memory of a step: measured block by block, given categories, and replayed as CUDA reserves it.

- `meter.py`: `record` runs a function under PyTorch's profiler and returns its `Trace`. Start here.
- `lifetimes.py` makes a timeline by category of a trace. Predictions use it as well.
- `replay.py`: PyTorch's CUDA caching allocator, request by request; `allocation_script.py` shows
  what a program's habits do to it.
- `cuda.py`: the allocator's statistics and its limit on a real card.
- `garbage.py` lets collections of garbage pass over what existed before a run.
"""
