"""A cross entropy whose logits are never whole.

- `chunked_loss.py`: which layer is the head, and what refuses it. Start here.
- `lazy_logits.py`: a head that waits for its cross entropy.
"""
