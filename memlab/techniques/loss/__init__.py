"""A cross entropy whose logits are never whole.

- `chunked_loss.py`: the technique, and what refuses it. Start here.
- `heads.py`: which layer is the head.
- `lazy_logits.py`: a head that waits for its cross entropy.
"""
