"""The graph of a model or of a sharded step: what each node costs, and a graph with checkpoints.

In: a workload, whose model torch.fx can trace. Out: a `GraphTable`, whose rows are the nodes of the
graph with their bytes and seconds; or the same workload with a graph in which segments are
recomputed in backward.

- `tracing.py` gets the graph of a model. Start here.
- `node_costs.py` divides a predicted step among the nodes; `labels.py` says which operator belongs
  to which node; `graph_rows.py` is the result.
- `segments.py` inserts checkpoints.
"""
