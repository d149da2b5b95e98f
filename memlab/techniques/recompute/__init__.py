"""Recomputing: activations that are dropped in forward and computed again in backward.

- `checkpointing.py`: which modules of a model, and what refuses it. Start here.
- `blocks.py`: the repeated blocks of a model; `policies.py`: what a module keeps all the same.
- `recompute.py`: one checkpointed module; `keeping.py` keeps some outputs.
- `state.py`: what its forward begins with, put back for the recompute. `module_attributes.py`,
  `noted_places.py` and `watched.py` (tensors) are parts of it; `changes.py` is what one forward
  tells the next. `reachable.py` finds the places that a forward may write to, `places.py` reads and
  writes one; `without_graphs.py` keeps what is noted small.
- `model_cache.py`: caches of keys and values, which do not go with it.
- `checkpointing_source.py`: the same as plain PyTorch.
"""
