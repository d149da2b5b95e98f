"""Recomputing: activations are dropped in forward and computed again in backward.

- `checkpointing.py` checkpoints modules of a model, by config or by plan. Start here.
- `blocks.py` finds the repeated blocks of a model. `policies.py` decides which outputs a
  checkpointed module keeps.
- `recompute.py` checkpoints one module. `state.py` records everything that its recompute must start
  from, with the help of `reachable.py`, `places.py` and `watched.py`. `keeping.py` keeps outputs.
- `model_cache.py` switches off caches of keys and values, which cannot be combined with recompute.
- `checkpointing_source.py` is the same in plain PyTorch, for exported scripts.
"""
