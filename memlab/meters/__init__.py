"""Meters record every allocation of a running step and find out what each block was for.

- `meter.py`: `record` runs a function under PyTorch's profiler and returns its `Trace`. Start here.
- `lifetimes.py` makes a timeline by category from a trace. Predictions use it as well.
- `cuda.py` reads the statistics of CUDA's caching allocator and sets its limit.
- `module_calls.py` reports which module is running.
- `garbage.py` lets collections of garbage pass over what existed before a run.

A `Trace` (`memlab/trace.py`) comes out.
"""
