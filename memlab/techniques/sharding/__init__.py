"""Sharding: several processes, the ranks, train one model, each with a part of it or of the batch.

- `sharding.py`: the strategies. Start here. `refusals.toml`: what does not go with them.
- `ranks.py`: who this process is, and the model as it runs it.
- `replicated.py`, `fully_sharded.py`, `tensor_parallel.py`, `deepspeed_engine.py`: one kind each.
  `tensor_parallel.py` finds out by trying which layers ranks can divide.
- `divided_layers.py`: layers whose weights ranks divide, by DTensor.
- `sharding_source.py`: the lines of a script.
"""
