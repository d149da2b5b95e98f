"""Meters: every allocation of a step that really runs, and what each block of memory was for.

- `meter.py`: `record` runs a function under PyTorch's profiler and returns its `Trace`.
- `lifetimes.py`: from a trace to a timeline by category. Predictions go through it as well.
- `cuda.py`: statistics and limit of CUDA's caching allocator.
- `module_calls.py`: which module is at work.

A trace (`memlab/trace.py`) comes out. Start with `meter.record`.
"""
