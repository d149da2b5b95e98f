"""torch.compile and its Memory Budget API.

- `compilation.py` compiles a model, with checks. Start here.
- `partitions.py` chooses between the partitioner's plans for a budget.
- `footprint.py` counts what each plan would hold.
"""
