"""Verify that a technique does not change the training.

- `verify.py` runs three updates of both steps and compares them. Start here.
- `report.py` is what it returns.
- `updates.py` runs updates and records what each did; `differences.py` compares two of them.
- `full_batch.py` checks that the micro-batches give the gradient of the undivided batch.
- `accumulation.py` decides that once for a workload, from a few samples;
  `per_sample.py` does by shapes, where the model is too large to run.
- `one_loss.py` sees whether a loss is one, which an exported script needs.
- `kept_state.py` restores what functions keep from one run to the next.
"""
