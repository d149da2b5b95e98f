"""Runtime: steps run for real, in processes of their own, measured and verified.

- `isolation.py`: the caller's side of a run. Start here. `process.py` starts and ends the worker,
  `keeper.py` makes sure that none is left over, `start.py` is how one begins (with
  `standard_library.py`), `serving.py` what it does. `wire.py`: messages and jobs; `guard.py`:
  its limit of memory; `bar.py`: progress.
- `sending.py`: a person's functions, values and environment variables go to the worker;
  `same_step.py` tells steps apart.
- `unchanged.py` checks whether a job has changed the worker, by its `fingerprint.py`.
- `measure.py`, `measure_run.py`, `loading.py`: a step, a run and a data loader, measured;
  `inspect.py`: facts about a workload before it runs.
- `verify.py`: whether a technique left the training alone, by `updates.py`; `verify_report.py` is
  the answer. `accumulation.py`: whether micro-batches together give the gradient of the whole
  batch; `per_sample.py`: the same by shapes, for large models.
- `rank_group.py` and `rank.py`: real ranks.
"""
