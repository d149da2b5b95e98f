"""Integrations: trainers, config files, scripts and snapshots of other libraries, in and out.

- `from_trainer.py`: a trainer or a config file in, a workload and a `StepConfig` out. Start here.
  It reads config files of accelerate and DeepSpeed itself; `transformers_trainer.py` (with trl's),
  `transformers_workload.py` and `lightning.py` read trainers. `reading.py` reports every field, and
  `fields.json` names those that need no code.
- `export.py`: a step as a file without memlab, around the loop of each library (`flavors.toml`),
  whose text is in `templates/`. `definitions.py` writes a person's functions and values, which
  `own_source.py` finds, and `script_file.py` puts the file together.
- `snapshot.py`: a memory snapshot of PyTorch, and what was free in it; `snapshot_file.py` reads it;
  `snapshot_blocks.py`: who holds what (`snapshot_phases.toml`);
  `snapshot_comparison.py`: beside a prediction, by `snapshot_alignment.py`.
- `out_of_memory.py`: the message of an out-of-memory error in, its possible causes out.
- `training_step.py`: the step over batches of one's own; `estimator.py`: for scikit-learn;
  `lightning_recorder.py`: a callback.
- `person_script.py`: a person's own script, run without its card; `from_script.py`: its step.
- `watch.py`: what is written down when memory runs out, or grows, in a real run.
"""
