"""The worker: the process that runs every job, and the code that starts, feeds and ends it.

- In the caller: `isolation.py` decides where a job runs and waits for its turn. `process.py` is the
  worker process, `spare.py` keeps a second one ready, and `kept.py` is any process with a keeper.
  `bar.py` shows how far a call is.
- Between them: `keeper.py` is a small process that kills everything that would be left over.
  `job.py` is what they agree on, `wire.py` sends the messages.
- In the worker: `start.py` prepares the process, `serving.py` serves one job after another,
  `rehearsal.py` runs a first step of memlab's own, `standard_library.py` keeps Python's modules
  from being shadowed, and `unchanged/` checks whether a job has changed the process.

Start reading at `isolation.run` on one side and `serving.serve` on the other.
"""
