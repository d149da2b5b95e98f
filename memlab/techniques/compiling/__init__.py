"""torch.compile, and its Memory Budget API.

- `compilation.py`: compiling a model, with guards. Start here.
- `partitions.py`: the plans of its partitioner for a budget; `footprint.py`: what each would hold.
"""
