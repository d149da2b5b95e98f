"""A workload of a bare module, with a made-up batch and a made-up loss.

It says what a module costs whose data and loss are not at hand. A sample is tokens or an image; the
loss is a cross entropy over the last dimension of what the module returns, all labels 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.errors import WorkloadError
from memlab.workload import Workload

USUAL_CHANNELS = 3


def of_module(
    name: str,
    build_model: Callable[[], nn.Module],
    module: nn.Module,
    *,
    tokens: int | None,
    image_size: int | None,
) -> Workload:
    """Return a workload of a module that takes tokens or images.

    Args:
        name: that results show.
        build_model: returns a new module.
        module: one of them: its first embedding says how many tokens there are, its first
            convolution how many channels.
        tokens: of a sample.
        image_size: pixels along each side of an image.

    Raises:
        WorkloadError: neither or both sizes are given.
    """
    make_batch: Callable[[int], torch.Tensor]
    if tokens is not None and image_size is None:
        embeddings = (each for each in module.modules() if isinstance(each, nn.Embedding))
        vocabulary = next((each.num_embeddings for each in embeddings), 2)
        make_batch = partial(tokens_batch, tokens=tokens, vocab_size=vocabulary)
        said = f"{tokens} tokens"
    elif image_size is not None and tokens is None:
        layers = (each for each in module.modules() if isinstance(each, nn.Conv2d))
        channels = next((each.in_channels for each in layers), USUAL_CHANNELS)
        make_batch = partial(images_batch, image_size=image_size, num_channels=channels)
        said = f"{image_size} pixels"
    else:
        raise WorkloadError(
            f"{name} returned a {type(module).__name__}, a module whose samples are not known; "
            "give either tokens (--tokens 128) or an image size (--image-size 224), or return a "
            "memlab.Workload, or a tuple (module, example_batch, loss_fn)"
        )
    return Workload(
        name=f"{name}, {said}",
        build_model=build_model,
        make_batch=make_batch,
        compute_loss=made_up_loss,
    )


def tokens_batch(n: int, tokens: int, vocab_size: int) -> torch.Tensor:
    """Return n samples of random tokens, (n, tokens) int64."""
    return torch.randint(vocab_size, (n, tokens))


def images_batch(n: int, image_size: int, num_channels: int) -> torch.Tensor:
    """Return n random images, (n, channels, size, size) float32."""
    return torch.rand(n, num_channels, image_size, image_size)


def made_up_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy over the last dimension of what the model returns."""
    outputs: Any = model(batch)
    outputs = getattr(outputs, "logits", outputs)
    outputs = outputs[0] if isinstance(outputs, tuple | list) else outputs
    logits = outputs.flatten(0, -2)
    labels = logits.new_zeros(logits.shape[0], dtype=torch.int64)
    return nn.functional.cross_entropy(logits, labels)
