"""Visits: cases carried out on a device of this machine, as the lines of a record.

- `case.py`: one thing to record.
- `bench.py`: the device that cases are carried out on, and what is kept between them.
- `lines.py`: what a line holds of a step and of its operators; `operator_times.py` times these.
- `driver.py`: what the device is, and what its driver says.

`memlab/doctor/` and `benchmarks/gpu_suite/` decide what is recorded.
"""
