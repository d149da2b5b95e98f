"""Memory snapshots of PyTorch: a file that `torch.cuda.memory._dump_snapshot` wrote comes in.

A `Snapshot` goes out, which the pictures of `figures/snapshot_*.py` show. Nothing in a file is run.

- `opening.py`: `open_snapshot`. Start here. `snapshot.py`: its result.
- `plain_pickle.py` reads a pickle of plain data; `reading.py` makes the columns of `columns.py`.
- `lifetimes.py`: blocks and reserved bytes, reconstructed from the end. `phases.py`: what stacks
  tell, and the category of each block.
- `holders.py`, `growth.py`, `fragmentation.py`: who holds the peak, what leaks, what was free.
"""
