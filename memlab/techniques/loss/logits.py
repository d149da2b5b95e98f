"""Logits that are computed chunk by chunk, inside the cross entropy.

The logits of a language model have one number for each token and each word of the vocabulary. A
plain step holds three tensors of that size: the logits, their log-softmax and their gradient.

Here the last linear layer (the head) returns `LazyLogits`, a tensor without memory that refers to
the hidden states. Slicing, flattening or transposing it does the same to the hidden states.
`torch.nn.functional.cross_entropy` then computes the logits and losses of a few tokens at a time.
Backward computes each chunk's logits again and passes their gradient on to the hidden states and
the weight at once. The sums are the same as in the plain step, in another order. Any other function
that reads the logits raises an error that names it, so nothing is silently wrong.

It is plain PyTorch, of which exported scripts contain what they call. Left out: fused kernels,
which may save the second product with the head (`fused_loss.py`).
"""

import math
from typing import Any

import torch
from torch import nn

from memlab.errors import UnsupportedError

QUESTIONS = frozenset(("shape", "dtype", "device", "layout", "ndim", "is_cuda", "requires_grad"))
QUESTIONS |= frozenset(
    ("_base", "size", "dim", "ndimension", "numel", "nelement", "is_floating_point")
)
CUTS = frozenset(
    ("flatten", "view", "reshape", "__getitem__", "squeeze", "unsqueeze", "contiguous")
)
TURNS = frozenset(("transpose", "permute", "swapaxes", "movedim"))
CASTS = frozenset(("float", "to", "half", "bfloat16", "double", "type"))


class ChunkedHead:
    """The forward of a linear head that waits for its loss.

    Attributes:
        linear: has the weight (classes, features) and the bias (classes,) or None.
        num_chunks: pieces that the tokens are split into.
        was_used: whether a loss was taken of what it returned.
        before_backward: functions of `fully_shard` that are called when backward begins.
        field: the setting that asks for it.
        off: this setting as it is without.
    """

    field, off = "loss_chunks", "loss_chunks=1"

    def __init__(self, linear: nn.Linear, num_chunks: int) -> None:
        self.linear, self.num_chunks, self.was_used = linear, num_chunks, False
        self.before_backward: list[Any] = []

    @property
    def asked(self) -> str:
        """The setting as a person writes it."""
        return f"loss_chunks={self.num_chunks}"

    def __call__(self, hidden: torch.Tensor) -> "LazyLogits":
        """Return logits of (..., features) hidden states without making them."""
        self.before_backward = []
        kind = hidden.device.type
        cast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if cast else hidden.dtype
        return LazyLogits(hidden, self, hidden.ndim - 1, dtype)

    def loss(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor,
        options: tuple[torch.dtype, int, float],
        reduction: str,
    ) -> torch.Tensor:
        """Return the cross entropy of some tokens.

        Args:
            hidden: (tokens, features).
            target: (tokens,).
            options: the format of the logits, the index that does not count, label smoothing.
            reduction: as in PyTorch's function.
        """
        losses: torch.Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
            hidden, self.linear.weight, self.linear.bias, target, self.num_chunks, options
        )  # (tokens,)
        return reduced(losses, target != options[1], reduction)


class LazyLogits(torch.Tensor):
    """What a linear head returns in place of its logits: their shape, and no memory.

    Attributes:
        hidden: what the head was given, cut as the logits have been cut since, (..., features).
        head: where they would come from.
        class_dim: the dimension of the classes, the last one unless it was transposed.
    """

    hidden: torch.Tensor
    head: ChunkedHead
    class_dim: int

    @staticmethod
    def __new__(
        cls, hidden: torch.Tensor, head: ChunkedHead, class_dim: int, dtype: torch.dtype
    ) -> "LazyLogits":
        """Return logits in a format; `hidden` has features where they have classes."""
        shape = list(hidden.shape)
        shape[class_dim] = head.linear.out_features
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=torch.is_grad_enabled()
        )
        made.hidden, made.head, made.class_dim = hidden, head, class_dim
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no memory, take the cross entropy in chunks, refuse the rest."""
        kwargs = kwargs or {}
        name = func.__name__ if func.__name__ != "__get__" else func.__self__.__name__
        if func is nn.functional.cross_entropy and args and type(args[0]) is cls:
            return chunked_cross_entropy(*args, **kwargs)
        if name in QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = NotImplemented
        if args and type(args[0]) is cls:
            if name == "register_hook" and _is_of_shards(args[1]):
                args[0].head.before_backward.append(args[1])
                return None
            if name in CUTS:
                found = args[0]._cut(name, args[1:], kwargs)
            elif name in TURNS:
                found = args[0]._turned(func, args[1:], kwargs)
            elif name in CASTS:
                found = args[0]._cast(func, args[1:], kwargs)
        if found is NotImplemented:
            raise _needs_all(name, args)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Refuse what reaches a kernel."""
        raise _needs_all(func, args)

    def _cut(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do to the hidden states what is done to the logits, where it leaves the classes whole."""
        if name == "contiguous":
            return self
        last = len(self.shape) - 1
        if self.class_dim != last:
            return NotImplemented
        if name == "__getitem__":
            index = args[0] if isinstance(args[0], tuple) else (args[0],)
            whole = _leaves_the_last_dimension(index, len(self.shape))
            return self._as(self.hidden[index]) if whole else NotImplemented
        # where the classes end up is seen on a tensor of no memory
        like = torch.empty(self.shape, device="meta")
        shape = getattr(like, name)(*args, **kwargs).shape
        if not shape or shape[-1] != self.shape[-1]:
            return NotImplemented
        return self._as(self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    def _as(self, hidden: torch.Tensor) -> "LazyLogits":
        return LazyLogits(hidden, self.head, hidden.ndim - 1, self.dtype)

    def _turned(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Turn the hidden states as the logits are turned."""
        place = torch.empty([2 + i for i in range(len(self.shape))], device="meta")
        class_dim = func(place, *args, **kwargs).shape.index(2 + self.class_dim)
        turned = func(self.hidden, *args, **kwargs)
        return LazyLogits(turned, self.head, class_dim, self.dtype)

    def _cast(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note the format that the logits are read in."""
        cast = func(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)
        if not isinstance(cast, torch.Tensor) or cast.device != self.device:
            return NotImplemented
        return LazyLogits(self.hidden, self.head, self.class_dim, cast.dtype)


def _needs_all(name: Any, args: Any) -> UnsupportedError:
    """Return the error of a function that reads logits."""
    heads = [arg.head for arg in args if type(arg) is LazyLogits]
    head = heads[0] if heads else ChunkedHead
    return UnsupportedError(
        f"{head.field}: {name} needs all logits at once; compute the loss by calling "
        f"torch.nn.functional.cross_entropy on the output of the last nn.Linear, or use {head.off}"
    )


def _is_of_shards(hook: Any) -> bool:
    """Return whether a hook is one of `fully_shard`, which returns the gradient as it was given."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _leaves_the_last_dimension(index: tuple[Any, ...], ndim: int) -> bool:
    """Return whether an index of slices, numbers and masks leaves the last dimension as it is."""
    if any(entry is None or isinstance(entry, bool | list) for entry in index):
        return False
    after = index[index.index(...) + 1 :] if any(e is ... for e in index) else None
    if after is not None:
        return not after or after[-1] == slice(None)
    is_mask = (isinstance(e, torch.Tensor) and e.dtype is torch.bool for e in index)
    read = sum(e.ndim if mask else 1 for e, mask in zip(index, is_mask, strict=True))
    return read < ndim or index[-1] == slice(None)


def chunked_cross_entropy(
    logits: LazyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits that are never whole.

    Args:
        logits: (tokens, classes), or with the classes second, as PyTorch's function takes them.
        target: class numbers, of the shape of the logits without the classes.
        weight: None.
        size_average: None.
        ignore_index: targets that neither the sum nor the mean counts.
        reduce: None.
        reduction: "mean" over the targets that count, "sum", or "none".
        label_smoothing: as in PyTorch's function.

    Raises:
        UnsupportedError: what is not done in chunks: weights of classes, probabilities as targets.
    """
    head = logits.head
    whole = (weight, size_average, reduce) == (None, None, None)
    if not whole or target.is_floating_point() or logits.ndim - target.ndim != 1:
        raise UnsupportedError(
            f"{head.field}: cross_entropy with class weights, deprecated arguments or targets that "
            f"are not class indices is not implemented without all logits; use {head.off}"
        )
    if logits.class_dim != min(1, logits.ndim - 1):
        raise UnsupportedError(
            f"{head.field}: the logits of shape {tuple(logits.shape)} have their classes in "
            f"dimension {logits.class_dim}, and cross_entropy expects them in dimension 1; flatten "
            f"or transpose the logits, or use {head.off}"
        )
    head.was_used = True
    hidden = logits.hidden.movedim(logits.class_dim, -1)
    losses = head.loss(
        hidden.reshape(-1, hidden.shape[-1]),
        target.reshape(-1),
        (logits.dtype, ignore_index, label_smoothing),
        reduction,
    )
    for hook in head.before_backward if losses.requires_grad else ():
        losses.register_hook(hook)
    return losses.view_as(target) if reduction == "none" else losses


def reduced(losses: torch.Tensor, counts: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the losses of tokens as PyTorch reduces them; those that do not count are 0."""
    if reduction == "none":
        return losses
    total: torch.Tensor = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


class _Losses(torch.autograd.Function):
    """The cross entropy of each token; chunks of logits are made in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        num_chunks: int,
        options: tuple[torch.dtype, int, float],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.num_chunks, ctx.options = num_chunks, options
        kind = hidden.device.type
        ctx.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # not the parameter itself, of which autocast would remember a cast without a gradient
        head = weight.detach(), None if bias is None else bias.detach()
        pairs = zip(_pieces(hidden, num_chunks), _pieces(target, num_chunks), strict=True)
        return torch.cat([_losses(piece, *head, labels, options) for piece, labels in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # a second derivative would be zero without a word
            raise UnsupportedError(
                "loss_chunks: the loss is differentiated with create_graph=True, and a loss in "
                "chunks has no second derivative; use loss_chunks=1"
            )
        hidden, weight, bias, target = ctx.saved_tensors
        kind, enabled, dtype = ctx.autocast
        wanted = [position for position in range(3) if ctx.needs_input_grad[position]]
        sums: list[torch.Tensor | None] = [None, None, None]
        if 0 in wanted:
            sums[0] = torch.empty_like(hidden)
        pieces = [_pieces(tensor, ctx.num_chunks) for tensor in (hidden, target, grads[0])]
        into = _pieces(hidden if sums[0] is None else sums[0], ctx.num_chunks)
        for piece, labels, grad, place in zip(*pieces, into, strict=True):
            given = [piece.detach(), weight.detach(), None if bias is None else bias.detach()]
            for position in wanted:
                given[position].requires_grad_()
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
                losses = _losses(given[0], given[1], given[2], labels, ctx.options)
            found = torch.autograd.grad(losses, [given[position] for position in wanted], grad)
            del losses
            for position, part in zip(wanted, found, strict=True):
                known = sums[position]
                if position == 0:
                    place.copy_(part)
                else:
                    sums[position] = part if known is None else known.add_(part)
            del found, part, given
        return (*sums, None, None, None)


def _losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: tuple[torch.dtype, int, float],
) -> torch.Tensor:
    """Return the losses of some tokens, with their logits made whole."""
    dtype, ignore_index, smoothing = options
    return nn.functional.cross_entropy(
        nn.functional.linear(hidden, weight, bias).to(dtype),
        target,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=smoothing,
    )


def _pieces(tensor: torch.Tensor, num_chunks: int) -> tuple[torch.Tensor, ...]:
    """Return a tensor cut along its first dimension into equal pieces, the last one the smaller."""
    pieces: tuple[torch.Tensor, ...] = tensor.split(max(1, math.ceil(len(tensor) / num_chunks)))
    return pieces


# Find the linear layer of a model that computes its logits.
#
# It is plain PyTorch, of which exported scripts contain what they call.


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
