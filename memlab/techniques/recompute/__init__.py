"""Recomputing: activations that are dropped in forward and computed again in backward.

- `checkpointing.py`: which modules of a model, and what refuses it. Start here.
- `blocks.py`: which modules a text means, by `repeated_blocks.py` and `named_modules.py`.
- `policies.py`: what a module keeps all the same, by `keepable.py` and `presets.py`.
- `recompute.py`: one checkpointed module. `state.py` notes what its forward begins with, and finds
  that with `reachable.py`, `places.py` and `watched.py`; `keeping.py` keeps some outputs.
- `model_cache.py`: caches of keys and values, which do not go with it; `caches.py` switches them
  off.
- `checkpointing_source.py`: the same as plain PyTorch.
"""
