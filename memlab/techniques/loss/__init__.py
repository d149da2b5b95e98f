"""A cross entropy that is computed in chunks, so that all logits are never held at once.

- `chunked_loss.py` is the technique. Start here.
- `heads.py` finds the layer that computes the logits.
- `lazy_logits.py` is the layer that computes its logits only inside the cross entropy.
"""
