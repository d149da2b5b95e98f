"""Building a model without memory, then making it where it is trained.

- `meta_init.py`: the technique. Start here.
- `deferred.py`: a model's operators, noted on fake tensors and run on a device afterwards.
"""
