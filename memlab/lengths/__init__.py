"""Samples of many lengths: which batches they make, and what those cost.

A workload, the lengths of its samples, a config and a device go in; a `LengthsResult` comes out.
Start with `predict.py`.

- `distribution.py`: how long the longest sample of a random batch is.
- `batchings.py`: padding, grouping by length and packing: how much of a batch is padding.
- `curve.py`: the step at any length, from steps that were recorded at a few.
- `recorded_lengths.py`: at which lengths it is recorded, until one that was left out agrees.
- `fitting.py`: up to which length a step fits a limit.
- `many_batches.py`: what the caching allocator reserves in a run of many batches.
- `lengths_result.py`: what comes out.
"""
