"""The loss: what it brings along, and cross entropies that never hold all logits.

- `chunked_loss.py` computes it in chunks, `fused_loss.py` by a package (cut
  cross-entropy, Liger's, trl's). `logits.py`: logits that are never whole, and the layer that
  computes them.
- `loss_tensors.py`: a teacher, class weights, parameters of the loss.
- `several_losses.py`: several losses in one step, each with its update.
"""
