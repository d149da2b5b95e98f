"""Train with a built step: batch after batch, in one process or in each of several ranks.

In: a workload, a config, and batches of a person's own. Out: updates with their losses, and
checkpoints that another number of ranks can load.

Start with `training_step.py`; `saving/checkpoints.py` saves and loads. `estimator.py` makes a
scikit-learn classifier of a step; it needs skorch, and is imported by whoever wants it.
"""
