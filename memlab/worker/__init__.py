"""The worker: the process in which everything runs, and how its caller holds it.

In the caller: `isolation.py` decides where a job runs and whose turn it is; `process.py` holds the
worker, `spare.py` one that stands ready, `kept.py` any process with a keeper.
Between them: `keeper.py`, a small process that leaves nothing behind; `wire.py`, the messages.
In the worker: `start.py` begins it, `serving.py` serves one job after another, `rehearsal.py` runs
a first step of memlab's own, `standard_library.py` keeps Python's modules from being shadowed, and
`unchanged/` tells whether a job has left the process as it was.

Start with `isolation.run` on one side and `serving.serve` on the other.
"""
