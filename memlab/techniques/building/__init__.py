"""Build a model without memory, then create its weights on the device where it is trained.

- `meta_init.py` is the technique. Start here.
- `deferred.py` records a constructor's operators on fake tensors and replays them on a device.
"""
