"""Importing: a configured trainer or a config file in, a `StepConfig` and a `Workload` out.

Every field of the source is reported: imported, not concerned, or not imported with the reason. No
library is imported here: an object says by its classes which library it comes from.

- `opening.py`: `from_trainer`. Start here. `imported.py`: its result.
- `reading.py` collects what becomes of each field; `precisions.py` and `optimizer_classes.py` are
  what several libraries share; `samples.py` makes batches of a data set.
- `transformers_arguments.py`, `transformers_names.py`, `transformers_trainer.py`,
  `transformers_workload.py`, `transformers_loss.py`: transformers. `copied_model.py` copies a
  model, and `own_loss.py` runs the loss of a subclass.
- `trl_trainer.py`: trl, whose trainers are such subclasses.
- `lightning_trainer.py`, `lightning_module.py`: Lightning.
- `accelerate_file.py`, `deepspeed_file.py`: config files.
"""
