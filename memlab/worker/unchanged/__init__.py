"""Is a worker still as it was before its jobs? If not, it serves no other workload.

- `worker_state.py`: the question itself, asked after each job. Start here.
- `fingerprint.py`: what modules hold; `parts.py`: what functions and classes are made of;
  `process_state.py`: what the process is set to.
- `usual_changes.py`: what libraries change in themselves and mean nothing by it.
"""
