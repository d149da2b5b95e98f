"""Predicting: the same results as measuring, from a step that is only traced.

- `predict.py`: the result of a traced step. Start here. `evidence.py`: how far off it is, by public
  runs of real cards, and which of them are nearest; `error_bounds.py`: where none says it;
  `check_against_runs.py`: beside what was measured of the same step.
- `batch_size_model.py`: a traced step as arithmetic; `interpolation.py`: the result of another
  batch size, number of micro-batches or memory budget by that arithmetic. `step_file.py` writes it
  as a file, for a page that computes the same.
- `budget_frontier.py`: which modules to recompute for each memory budget, by what each would save
  (`recompute_evaluator.py`). `planning.py` makes that in a worker, `plans.py` picks a `Plan` in the
  caller.
- `predict_run.py`: a whole run in stages (`run_stages.py`), as `run_settings.py` and `run_spec.py`
  ask for it; `run_result.py` is the answer. `predict_script.py`: the same of a person's script,
  `script_faults.py` what is wrong in it.
- `step_graph.py`: what each node of a graph costs, as rows of `graph_table.py`.
"""
