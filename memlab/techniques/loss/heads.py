"""Which linear layer of a model makes its logits.

An exported script holds this file as it stands, so it imports nothing of memlab but errors.
"""

from torch import nn

from memlab.errors import UnsupportedError


def find_head(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the linear layer whose output should go into a cross entropy, and its path.

    Raises:
        UnsupportedError: there is none.
    """
    linear = {
        module: path
        for path, module in model.named_modules()
        # a subclass may compute something else
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        told = ask() if callable(ask) else None
        if told in linear:
            return linear[told], told
    if not linear:
        raise UnsupportedError(
            f"loss_chunks: {type(model).__name__} has no nn.Linear whose output could be the "
            "logits; use loss_chunks=1"
        )
    head, path = list(linear.items())[-1]
    return path, head
