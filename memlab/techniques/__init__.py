"""Techniques: everything that changes how a step is trained.

Each technique is one object, a `Technique` at the end of the file that implements it.
`technique.py` defines what belongs to a technique, `every.py` lists all of them, and
`memlab.step.build_step` applies them in order.

- Techniques in this folder: `accumulation.py` (micro-batches), `precision.py` (number formats),
  `layout.py` (channels last), `attention.py` (its implementation), `inplace.py`, `clipping.py`
  (gradients), `segments.py` (of the allocator).
- Techniques in folders of their own: `recompute/`, `offload/`, `optimizers/`, `loss/`,
  `compiling/`, `building/`.
- Shared parts: `source.py` (lines of an exported script), `batches.py` (the tensors of a batch),
  `same_operators.py` (checks that a model still runs the operators that a decision was based on).
- Files that exported scripts contain whole: `casts.py`, `fp8_layers.py`, `batch_tensors.py`,
  `attention_setting.py`, and others in the folders.

To add a technique: add its field to `memlab/config.py`, write its file, and add one line each to
`every.py` and `build_step`. `python -m benchmarks.combinations` and `python -m benchmarks.saving`
then write what docs/ derives from it.
"""
