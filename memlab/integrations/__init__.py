"""Integrations: trainers, config files, scripts and snapshots of other libraries, in and out.

- `from_trainer.py`: a trainer or a config file in, a workload and a `StepConfig` out. Start here.
  `reading.py` reports every field; `transformers_trainer.py`, `transformers_workload.py`,
  `transformers_arguments.py`, `trl_trainer.py`, `lightning.py`, `accelerate_file.py`,
  `deepspeed_file.py`: one source each.
- `export.py`: a step as a file without memlab. `definitions.py` writes a person's functions and
  values, which `own_source.py` finds, `script_file.py` puts the file together, `with_*.py` are its
  flavors and `library_parts.py` what these share.
- `snapshot.py`: a memory snapshot of PyTorch, and what was free in it; `snapshot_file.py` reads it;
  `snapshot_blocks.py`: who holds what; `snapshot_comparison.py`: beside a prediction, by
  `snapshot_alignment.py`.
- `training_step.py`: the step over batches of one's own; `estimator.py`: for scikit-learn;
  `lightning_recorder.py`: a callback.
"""
