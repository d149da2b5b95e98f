"""The graph of a model or of a sharded step, and what each node of it costs: a job of the worker.

In: a workload, a config, a device. Out: a `GraphTable`, whose rows are the nodes with their bytes
and seconds, which sum to those of the prediction.

- `graph_jobs.py` does it. Start here.
- `tracing.py` gets the graph of a model by torch.fx; `labels.py` says which operator belongs to
  which node; `node_costs.py` divides a recorded step among the nodes, and `row_sums.py` adds up.
- `graph_rows.py` is the result.
- `segments.py` inserts checkpoints into the graph of a model: `memlab.checkpoint_graph`.
"""
