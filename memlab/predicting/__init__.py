"""Predicting: the same `StepResult`, from a step that is only recorded.

- `predict.py`: the result of a recorded step: costs and lifetimes put together. Start here.
- `memory_widths.py`: how far off predicted memory of a card is, from `memory.json`.
- `check_against_runs.py`: a prediction for this CPU beside what was measured of the same step.
- `forecast.py`: a recorded step as arithmetic, for a slider.
- `interpolation.py`: the result of another batch size, by that arithmetic.
- `regrouping.py`: an estimate of another number of micro-batches, from pieces of its timeline.
- `operator_costs.py`: which operators a step runs, for records of a device.
"""
