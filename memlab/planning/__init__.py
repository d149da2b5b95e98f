"""Planning: which modules to recompute, for every memory budget.

- `what_if.py`: who holds each activation of a recorded plain step until when, and what the step
  would hold if some modules were recomputed.
- `cut.py`: a choice of modules, none inside another; `chain.py`: choices from the plain step down
  to the least that can be held.
- `chains.py` makes a chain in the worker; `plans.py` keeps chains in the caller and picks a `Plan`.

Start with `what_if.py`, which holds the idea.
"""
