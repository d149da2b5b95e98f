"""Activation checkpointing: activations are dropped in forward and computed again in backward.

- `checkpointing.py`: the technique. Start here. `policies.py`: which modules, and what they keep.
- `recompute.py` checkpoints one module. `changes.py`: what its forward changes beside its output,
  noted and put back; `places.py` finds where in Python that can be, `watched.py` in which tensors.
- `model_cache.py`: the cache of keys and values, switched off while a model trains.
- `graph_segments.py`: `memlab.checkpoint_graph`, checkpoints in a graph of torch.fx.
- `blocks.py` finds the repeated blocks of a model, and modules by name.
- `checkpointing_source.py`: the lines of a script.
"""
