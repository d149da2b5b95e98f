"""Techniques: what a step can do to take less memory or time.

- `technique.py`: `Technique`, everything that memlab knows about one, in one place; and `Plan`.
- `registry.py`: all of them, in the order in which they apply. To add a technique, add it there.
- `step.py`: `build_step`, the one way to build a training step. Start here.
- `script.py`: the same step as plain PyTorch, of the lines in `source.py`.
- `catalogue.toml`: what each setting saves, at what price and in which words.
- `trials.py`: samples on which a technique tries what a model does, and what a step requires.
- One file a technique: `accumulation.py`, `attention.py`, `clipping.py`, `compilation.py`,
  `inplace.py`, `layout.py`, `meta_init.py` (by `deferred.py`), `precision.py`,
  `expandable_segments.py`.
- Rooms: `checkpointing/`, `loss/`, `offload/`, `optimizers/`, `sharding/`.
- `batches.py`: what of a batch goes to the device, and when.
- `checkpoints.py`: saving and loading a training state; `checkpoint_contents.py`: what that holds
  and takes.

Exported scripts contain what they call of these files (`inlined` in `source.py`): it is plain
PyTorch, and memlab runs it too.
"""
