"""Planning decides which modules to recompute, for every memory budget.

- `what_if.py` finds out what holds each activation of a recorded plain step, and until when. It
  explains the idea: start here.
- `cut.py` computes what the step would hold if some modules were recomputed.
- `chain.py` makes plans from the plain step down to the least that can be held.
- `chains.py` makes a chain in the worker; `plans.py` caches it in the caller and picks a `Plan`.
- `divided.py` has a worker find which layers several ranks divide, which is no matter of memory.
"""
