"""Check whether a job has changed the worker. If it has, the worker takes no more jobs.

- `worker_state.py` makes the check after each job. Start here.
- `fingerprint.py` compares what modules hold, `parts.py` what functions and classes are made of,
  and `process_state.py` the settings of the process.
- `usual_changes.py` lists the harmless changes that libraries make to themselves.
"""
