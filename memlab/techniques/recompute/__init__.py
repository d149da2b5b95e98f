"""Recomputing: activations are dropped in forward and computed again in backward.

- `checkpointing.py` checkpoints modules of a model, by config or by plan. Start here.
- `blocks.py` selects these modules: `repeated_blocks.py` finds the repeated blocks of a model,
  `named_modules.py` modules by name, and `nesting.py` says which are inside of others.
- `policies.py` decides which outputs a checkpointed module keeps: `presets.py` by a preset, and
  `keepable.py` says which may be kept at all.
- `recompute.py` checkpoints one module. `keeping.py` keeps outputs.
- `state.py` records everything that its recompute must start from: `module_attributes.py`,
  `noted_places.py` and `watched.py` (tensors) each record a part of it, and `changes.py` tells
  the next forward what changed in this one. `reachable.py` finds the places that a forward may
  write to, `places.py` reads and writes one, `without_graphs.py` keeps the record small.
- `model_cache.py` is the technique that switches off caches of keys and values, which cannot be
  combined with recompute; `caches.py` does it.
- `checkpointing_source.py` is the same in plain PyTorch, for exported scripts.
"""
