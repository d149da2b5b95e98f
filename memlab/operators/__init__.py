"""Operators: what tells one call of an operator from another, and what a call costs.

- `signatures.py`: a `Signature` is all that memory and time of a call depend on: shapes, strides,
  number formats, plain arguments.
- `standalone.py`: a signature made into a call on real memory, to be run alone.
- `cost.py`: `OperatorCost`, what running it alone has shown.
"""
