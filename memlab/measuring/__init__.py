"""Measure a step on the real device, in the current process.

- `measure.py` runs a memory pass with a meter, then a time pass without one. Start here.
- `loading.py` measures what a data loader adds to a step.
- `collective_calls.py` notes the collectives that a rank calls, and `collective_threads.py` lets
  their threads end in time.
- `processes.py`: the memory of processes that load data.
- `inspect.py` finds facts about a workload before it runs.

A workload and a config come in, a `StepResult` goes out. The worker calls these functions.
"""
