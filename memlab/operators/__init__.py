"""Operators: what identifies a call of an operator, and what a call costs.

- `signatures.py`: a `Signature` contains everything that the memory and time of a call depend on:
  shapes, strides, number formats, plain arguments. Start here.
- `standalone.py` turns a signature into a call on real memory, to run it alone.
- `collectives.py`: which operators are collectives of several ranks, and how much they send.
- `cost.py`: `OperatorCost` is the result of running it alone.
"""
