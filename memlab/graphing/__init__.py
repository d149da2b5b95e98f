"""What a person does with the graph of a model: read what its nodes cost, insert checkpoints.

In: a workload, whose model torch.fx can trace. Out: a `GraphTable` from the worker for predictions;
or the same workload with a graph in which segments are recomputed in backward.

- `graph_of_step.py`: `memlab.graph_table`.
- `segments.py`: `memlab.checkpoint_graph`.
"""
