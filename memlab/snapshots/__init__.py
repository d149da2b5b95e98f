"""Memory snapshots of PyTorch: a file that `torch.cuda.memory._dump_snapshot` wrote comes in.

A `Snapshot` goes out, which the pictures of `figures/snapshot_*.py` show. Nothing in a file is run.

- `opening.py`: `open_snapshot`. Start here. `snapshot.py`: its result.
- `plain_pickle.py` reads a pickle of plain data; `reading.py` makes the columns of `columns.py`.
- `lifetimes.py`: blocks and reserved bytes, reconstructed from the end. `phases.py`: the
  phase of each stack, and the category of each block.
- `holders.py`, `growth.py`, `fragmentation.py`: who holds the peak, what leaks, what was free.
- `comparing.py`: `Snapshot.compare`, a step beside its prediction; `comparison.py` is its result
  and `summary.py` the sentence above it. `recent.py` keeps the newest blocks, `step_blocks.py`
  finds the last whole step among them, and `alignment.py` each block on the other side.
"""
