"""Techniques: everything that changes how a step is trained.

Each is one object, a `Technique` at the end of the file that does it. `technique.py` says what
belongs to one, `every.py` lists them all; `memlab.step.build_step` applies them in order.

- here: `accumulation.py` (micro-batches), `precision.py` (number formats), `layout.py` (channels
  last), `inplace.py`, `segments.py` (of the allocator);
- `recompute/`, `offload/`, `optimizers/`, `loss/`, `compiling/`, `building/`: rooms of their own;
- `source.py`: lines of a script, and the files that it holds as they stand (`casts.py`,
  `fp8_layers.py`, `batch_tensors.py` and others in the rooms);
- `batches.py`: the tensors of a batch; `same_operators.py`: whether a model still does what it did
  when something was decided.

To add a technique: its field in `memlab/config.py`, its file, a line in `every.py`, a line in
`build_step`.
"""
