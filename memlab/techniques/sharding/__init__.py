"""Sharding: several processes, the ranks, train one model, each with a part of it or of the batch.

In: a model as one process would train it, and a process group that torch.distributed has opened.
Out: the model that each rank runs, its part of the batch, and the weights of its micro-batches, so
that the averaged gradient is that of one process with the whole batch.

Start with `sharding.py`, which lists the strategies and what each refuses. `replicated.py` carries
out ddp and zero1, `fully_sharded.py` zero2, zero3 and hybrid, `tensor_parallel.py` the dividing of
layers, which `divided_source.py` writes into scripts. `rank_model.py` is a model as a rank runs it,
and `ranks.py` knows the ranks.
"""
