"""A whole run in stages: steps, evaluation, generation, saving, averaged weights.

A workload, a `StepConfig` and a `TrainingRun` go in, a `RunResult` comes out: the peak of each
stage, with what stands meanwhile. Start with `course.py`, which runs the stages one after the other
on real and on fake tensors alike.

- `run_settings.py`: what a run consists of beside its steps.
- `asked_run.py`: a run as it is asked for, and what its step is built from.
- `evaluating.py`, `generating.py`: the loops of the two stages that do not train.
- `course.py`: all stages in their order.
- `recorded_run.py`: the run over fake tensors, with batches and tokens repeated that look alike.
- `repeats.py`: how a repeated part of a trace is continued.
- `stage_costs.py`: what each stage holds, from a trace.
- `predicting_run.py`, `measuring_run.py`: the two jobs of a worker.
- `run_result.py`: what comes out.
"""
