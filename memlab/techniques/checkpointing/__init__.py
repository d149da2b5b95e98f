"""Activation checkpointing: activations are dropped in forward and computed again in backward.

- `checkpointing.py`: the technique. Start here. `policies.py`: which modules, and what they keep.
- `recompute.py` checkpoints one module. `changes.py`: what its forward changes beside its output,
  noted and put back; `mutable_state.py` finds where in Python that can be, `watched.py` in which
  tensors.
- `graph_segments.py`: `memlab.checkpoint_graph`, checkpoints in a graph of torch.fx.
- `blocks.py` finds the repeated blocks of a model, and modules by name; it switches off the cache
  of keys and values while a model trains.
- `checkpointing_source.py`: the lines of a script.
"""
