"""Find the linear layer of a model that computes its logits.

This file imports nothing from memlab but errors, because an exported script contains a copy of it.
"""

from torch import nn

from memlab.errors import UnsupportedError


def logits_of(model: nn.Module) -> tuple[int, str]:
    """Return over how many "words" or "classes" the last layer of a model decides; 0 of others.

    They are words where the model also looks up an embedding for each of them.
    """
    try:
        _, head = find_head(model)
    except UnsupportedError:
        return 0, ""
    count = head.out_features
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return count, "words" if any(t.num_embeddings == count for t in tables) else "classes"


def find_head(model: nn.Module, off: str = "loss_chunks=1") -> tuple[str, nn.Linear]:
    """Return the linear layer whose output should go into a cross entropy, and its path.

    Args:
        model: is searched.
        off: what to do where there is none: the setting as it is without.

    Raises:
        UnsupportedError: the model has no linear layer.
    """
    linear = {
        module: path
        for path, module in model.named_modules()
        # a subclass may compute something else
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    for module in model.modules():
        get_embeddings = getattr(module, "get_output_embeddings", None)
        embeddings = get_embeddings() if callable(get_embeddings) else None
        if embeddings in linear:
            return linear[embeddings], embeddings

    if not linear:
        raise UnsupportedError(
            f"{off.split('=')[0]}: {type(model).__name__} has no nn.Linear whose output could be "
            f"the logits; use {off}"
        )

    head, path = list(linear.items())[-1]
    return path, head
