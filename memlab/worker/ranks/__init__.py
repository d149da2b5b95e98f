"""Real ranks: processes of one step, started by torch's elastic launcher from the worker.

In: what to run in each rank, and how many there are. Out: the answer of every rank, or how it
ended; whatever happens, no process and no port is left.

    the worker                                        each rank: a process of its own
    measuring.py, verifying.py: what is asked,        rank.py: opens the process group, runs the
      and one answer from those of all ranks            functions that it is asked for
    group.py: starts the ranks, asks them,     <----> (one socket for each rank; arguments and
      and ends them                                     values are files in a folder)

Start with `measuring.py`.
"""
