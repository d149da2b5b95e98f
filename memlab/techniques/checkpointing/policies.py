"""What a checkpointed module keeps: presets, operators by name, or a person's own policy function.

Source: selective activation checkpointing, `torch.utils.checkpoint.CheckpointPolicy`. What
the presets keep, and what is never kept whatever the policy says, stands here too.
"""

import copyreg
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from memlab._util.checks import Policy
from memlab._util.torch_private.tensors import OpNamespace, OpOverloadPacket, names_of_all_operators
from memlab.config import PRESET_POLICIES
from memlab.errors import ConfigError, UnsupportedError
from memlab.techniques.checkpointing.blocks import find_blocks, find_named, is_block

# Decide which outputs of operators may be kept.
#
# Whatever the policy says, the following outputs are never kept:
#
# - views, and tensors that an operator writes in place;
# - random outputs: if one were kept, the recompute would draw fewer numbers than the
#   forward, all later draws would differ, and the gradients would be wrong;
# - casts: autocast caches those of weights, so a forward and its recompute run different
#   ones.
#
# It is plain PyTorch, of which exported scripts contain what they call.


def can_be_kept(func: OpOverload, values: dict[str, Any]) -> bool:
    """Return whether the output of an operator may be kept, whatever a policy says.

    Args:
        func: the operator.
        values: the arguments that the call passes, by name.
    """
    schema = func._schema
    aliases = any(value.alias_info is not None for value in schema.returns)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    casts = func is torch.ops.aten._to_copy.default
    return not (casts or aliases or writes or draws(func, values)) and bool(schema.returns)


def draws(func: OpOverload, values: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers in this call."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # attention and RNNs draw random numbers only with dropout
    for name in ("dropout_p", "dropout"):
        if name in (argument.name for argument in func._schema.arguments):
            return bool(values.get(name, 0.0))

    return True


def values_of(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without those left at their defaults."""
    names = (str(argument.name) for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


# Decide which outputs a preset keeps, by the names of operators.
#
# It is plain PyTorch, of which exported scripts contain what they call.

MATMULS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution")
) | frozenset(("_convolution", "cudnn_convolution", "mkldnn_rnn_layer", "_cudnn_rnn"))
ATTENTION = "_scaled_dot_product"
NORMS = frozenset(
    ("native_layer_norm", "native_batch_norm", "native_group_norm", "_native_batch_norm_legit")
) | frozenset(("_batch_norm_with_update", "cudnn_batch_norm", "_fused_rms_norm"))
CHEAP = NORMS | frozenset(
    ("_softmax", "_log_softmax", "_to_copy", "clone", "copy", "mean", "var_mean", "sum", "cat")
)


def by_preset(
    preset: str, func: OpOverload, _: int, args: Sequence[Any], kwargs: dict[str, Any], __: Any
) -> bool:
    """Return whether a preset keeps the output of an operator."""
    name = func.overloadpacket.__name__
    if preset == "keep-attention":
        return bool(name.startswith(ATTENTION))
    if preset == "keep-matmuls":
        return name in MATMULS or bool(name.startswith(ATTENTION))
    is_pointwise: bool = torch.Tag.pointwise in func.tags
    return not is_pointwise and name not in CHEAP


KeepRule = Callable[[OpOverload, int, Sequence[Any], dict[str, Any], Any], bool]
"""Returns whether to keep an output, from the overload, its number, args, kwargs and output."""

SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def operators(path: str) -> Any:
    """Return the object at a path below `torch.ops`: "aten", "aten.mm", "aten.mm.default"."""
    return functools.reduce(getattr, filter(None, path.split(".")), torch.ops)


def _sent_by_name(value: Any) -> tuple[Callable[[str], Any], tuple[str]]:
    path = "" if value is torch.ops else str(value)
    return operators, (value.name if isinstance(value, OpNamespace) else path,)


# a person's policy function refers to operators, which cannot be pickled for a worker otherwise
for kind in (type(torch.ops), OpNamespace, OpOverloadPacket, OpOverload):
    copyreg.pickle(kind, _sent_by_name)


def keeps(policy: Policy) -> KeepRule | None:
    """Return the function that decides what to keep; None if everything is recomputed.

    Raises:
        ConfigError: an operator of that name does not exist.
    """
    if callable(policy):
        return functools.partial(_by_function, policy)
    if policy == "recompute-all":
        return None
    if policy in PRESET_POLICIES:
        return functools.partial(by_preset, policy)
    return functools.partial(_by_list, overloads(policy))


def nothing_kept(policy: Policy, seen: Iterable[OpOverload]) -> str:
    """Return a sentence that says why a policy kept no output of these operators, and a remedy."""
    context = SelectiveCheckpointContext(is_recompute=False)
    for func in seen:
        if not callable(policy):
            break

        try:
            answer = policy(context, func.overloadpacket)
        except Exception:  # a policy that reads its arguments cannot be asked without them
            continue

        if answer is True or answer in SAVE:
            return (
                "checkpoint_policy keeps nothing: it compares operators with "
                f"{func.overloadpacket}, but is called with overloads; compare with "
                f"torch.ops.{func}"
            )

    ran = ", ".join(sorted(str(func) for func in seen if can_be_kept(func, {}))[:8])
    said = f"checkpoint_policy {_name(policy)} keeps nothing in the checkpointed modules. They run"
    if not ran:
        return f"{said} no operator whose output can be kept; use 'recompute-all'"

    return f"{said} {ran}; name some of these, or use 'recompute-all'"


def _name(policy: Policy) -> str:
    return getattr(policy, "__name__", None) or repr(policy)


def _by_list(listed: frozenset[OpOverload], func: OpOverload, _: int, *__: Any) -> bool:
    found: bool = func in listed
    return found


def _by_function(
    policy: Callable[..., Any],
    func: OpOverload,
    _: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
) -> bool:
    try:
        answer = policy(SelectiveCheckpointContext(is_recompute=False), func, *args, **kwargs)
    except Exception as error:
        raise ConfigError(
            f"checkpoint_policy {_name(policy)} raised {type(error).__name__} for {func}: {error}; "
            "it is called as policy(context, overload, *args, **kwargs)"
        ) from error

    if answer is True or answer is False:
        return answer is True

    if isinstance(answer, CheckpointPolicy):
        if answer in SAVE or answer in RECOMPUTE:
            return answer in SAVE

        raise UnsupportedError(
            f"checkpoint_policy {_name(policy)} returned {answer} for {func}: without "
            "torch.compile, PyTorch silently recomputes instead of offloading; return MUST_SAVE or "
            "MUST_RECOMPUTE"
        )

    said = repr(answer) if isinstance(answer, str | float | int | None) else type(answer).__name__
    raise UnsupportedError(
        f"checkpoint_policy {_name(policy)} returned {said} for {func}; allowed is a bool or a "
        "torch.utils.checkpoint.CheckpointPolicy: return True or CheckpointPolicy.MUST_SAVE to "
        "keep the output, False or CheckpointPolicy.MUST_RECOMPUTE to compute it again"
    )


def overloads(names: str) -> frozenset[OpOverload]:
    """Return the overloads for a list of names: "aten.mm, addmm, aten.bmm.default"."""
    found: list[OpOverload] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        namespace, _, rest = name.partition(".") if "." in name else ("aten", "", name)
        packet_name, _, overload = rest.partition(".")
        packet = _packet(namespace, packet_name)
        if not isinstance(packet, OpOverloadPacket):
            raise ConfigError(_unknown_operator(name))

        if overload and overload not in packet.overloads():
            raise ConfigError(
                f"checkpoint_policy names {name!r}, and {packet} has the overloads "
                f"{', '.join(packet.overloads())}; leave the overload out to mean all of them"
            )

        chosen = [overload] if overload else packet.overloads()
        found += [getattr(packet, each) for each in chosen]

    if not found:
        raise ConfigError(
            f"checkpoint_policy={names!r} names no operator; allowed is one of "
            f"{', '.join(map(repr, PRESET_POLICIES))}, or operators: 'aten.mm, aten.addmm'"
        )

    return frozenset(found)


def _packet(namespace: str, name: str) -> Any:
    """Return torch's operator of this name; None if there is none."""
    try:
        return getattr(getattr(torch.ops, namespace), name, None)
    except (RuntimeError, TypeError, ValueError):  # the text cannot be the name of an operator
        return None


def _unknown_operator(name: str) -> str:
    if len(name.split()) > 1 or ";" in name:
        names = ", ".join(name.replace(";", " ").split())
        return f"checkpoint_policy names {name!r}; separate operators by commas: {names!r}"
    every = names_of_all_operators()
    known = {full.removeprefix("aten::").split(".")[0] for full in every if "aten::" in full}
    choices = sorted(known | set(PRESET_POLICIES))
    bare = re.sub(r"^(torch\.)?(ops\.)?(aten(\.|::))?", "", name).split(".")[0]
    near = difflib.get_close_matches(bare, choices, n=1)
    presets = ", ".join(map(repr, PRESET_POLICIES))
    hint = f"allowed are {presets} and operators such as 'aten.mm'"
    if near:
        hint = f"did you mean {near[0] if near[0] in PRESET_POLICIES else f'aten.{near[0]}'!r}?"

    return f"checkpoint_policy names the operator {name!r}, which does not exist; {hint}"


# Select the modules to checkpoint: the repeated blocks of a model, or modules by name.

AUTO = "auto"
EVERY = re.compile(r"every 0*([1-9]\d*)")


def select(model: nn.Module, which: str) -> dict[str, nn.Module]:
    """Return the modules to checkpoint by path, none inside another.

    Args:
        model: as built.
        which: "auto" for the repeated blocks, "every 3" for the first of every three blocks, the
            name of a class, or a pattern of paths as `fnmatch` reads it: "encoder.layers.*".

    Raises:
        UnsupportedError: no module matches; the message says which there are.
    """
    every = EVERY.fullmatch(which)
    if which == AUTO or every:
        blocks = find_blocks(model)
        if not blocks:
            raise UnsupportedError(
                f"checkpointing='blocks' found no repeated blocks in {type(model).__name__}; "
                "select modules with checkpoint_modules (a class or a pattern of paths), or use "
                "accumulation_steps to save activations"
            )

        step = int(every[1]) if every else 1
        return dict(list(blocks.items())[::step])

    named = find_named(model, which)
    if not named:
        raise UnsupportedError(_nothing_meant(model, which))

    return named


def _nothing_meant(model: nn.Module, which: str) -> str:
    modules = {path: module for path, module in model.named_modules() if path}
    classes = {type(m).__name__ for m in modules.values() if is_block(m)}
    near = difflib.get_close_matches(which, [*classes, *modules], n=1, cutoff=0.5)
    suggestion = f"did you mean {near[0]!r}? " if near else ""

    return (
        f"checkpoint_modules={which!r} matches no module of {type(model).__name__}: {suggestion}"
        "allowed are 'auto', 'every 2', a class "
        f"({', '.join(sorted(classes)[:4]) or 'it has none with children'}) or a pattern of paths "
        f"('{next(iter(modules), '')}')"
    )
