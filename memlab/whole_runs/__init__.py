"""`predict_run` and `measure_run`: the public functions for a whole run of `stages/`.

A workload, a `StepConfig` and a `TrainingRun` go in, a `RunResult` comes out. What can be checked
without running is checked in `calls.py`, in the caller; the run itself is a job of the worker.
"""
