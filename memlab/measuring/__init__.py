"""Measuring: a step on the real device, in the process that this is called in.

- `measure.py`: a memory pass with a meter, then a time pass without one.
- `loading.py`: what a data loader does to a step.
- `inspect.py`: what can be said of a workload before it runs.

Workload and config come in, a `StepResult` goes out. The worker calls these.
"""
