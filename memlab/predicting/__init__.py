"""Predicting: the same `StepResult`, from a step that is only recorded.

- `predict.py`: the result of a recorded step: costs and lifetimes put together. Start here.
- `held_against.py`: a prediction for this CPU beside what was measured of the same step.
- `forecast.py`: a recorded step as arithmetic, for a slider.
- `interpolation.py`: the result of another batch size, by that arithmetic.
- `operator_costs.py`: which operators a step runs, for records of a device.
"""
