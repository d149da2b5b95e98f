"""Activation checkpointing: activations are dropped in forward and computed again in backward.

- `checkpointing.py`: the technique, and its lines in a script. Start here. `policies.py`: which
  modules, and what they keep.
- `recompute.py` checkpoints one module. `state.py`: what its forward changes beside its output,
  noted and put back; `places.py` finds where in Python that can be.
- `model_cache.py`: the cache of keys and values, switched off while a model trains.
- `graph_segments.py`: `memlab.checkpoint_graph`, checkpoints in a graph of torch.fx.
- `blocks.py` finds the repeated blocks of a model, and modules by name.
"""
