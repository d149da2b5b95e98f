"""Collect everything that a worker needs to run a person's workload as it is now.

- `by_value.py`: what a notebook defines, pickled by value.
- `own_values.py`: what a notebook has set on imported modules.
- `sources.py`: a person's own files, and whether they have changed since.
- `environment.py`: the environment variables of the caller.
- `same_step.py`: which step a job runs, so that results of the very same step find one another.
"""
