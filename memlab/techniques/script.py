"""`script`: the step of a config as plain PyTorch, which a person can run without memlab.

It puts the sources of the techniques together in the order of `build_step`. `integrations/`
writes a whole file around it, with the workload's own functions.
"""

import torch

from memlab._util.checks import checked
from memlab._util.units import in_docstring
from memlab.config import Sharding, StepConfig
from memlab.devices.here import as_device
from memlab.errors import UnsupportedError
from memlab.techniques import accumulation, batches, registry
from memlab.techniques.checkpointing import checkpointing
from memlab.techniques.sharding import sharding_source
from memlab.techniques.source import ScriptLines, merged, together
from memlab.techniques.technique import Plan, Setup
from memlab.workload import Workload

TREE_MAP = "from torch.utils._pytree import tree_map_only"


@checked()
def script(
    config: StepConfig,
    device: torch.device | str,
    plan: Plan | None = None,
    *,
    workload: Workload | None = None,
) -> str:
    """Return a script that defines `train(build_model, batches, compute_loss, device)`.

    Its losses and weights are those of `build_step`, bit by bit. For a workload with a
    `split_batch`, `train` takes that function too, and then a `num_loss_terms` if it needs one.

    Args:
        config: how to train.
        device: where; the script is written for this kind of device.
        plan: what to recompute, for a memory budget below 1 with the eager engine.
        workload: what is trained. One with a `split_batch` gets a script that splits by that
            function, and finds tensors in objects too; of any other the script is the same.

    Raises:
        UnsupportedError: this config is refused, or has no short form in plain PyTorch.

    >>> print(script(StepConfig(optimizer="sgd"), "cpu").splitlines()[-1].strip())
    return model, losses
    """
    if config.is_deepspeed:
        raise UnsupportedError(
            f"sharding={str(config.sharding)!r} has no script in plain PyTorch; use "
            "memlab.export_script with flavor='deepspeed'"
        )
    setup = Setup(config=config, device=as_device(device), plan=plan, workload=workload)
    imports, functions = parts(setup)
    first = "\n".join([_docstring(config), "", *imports])
    return "\n\n\n".join([first, *functions]) + "\n"


def parts(setup: Setup) -> tuple[list[str], list[str]]:
    """Return the imports of a script, and its functions, of which `train` is the last."""
    config, device, workload = setup.config, setup.device, setup.workload
    registry.check(config, device, workload=workload)
    checkpointing.check_plan(config, setup.plan)
    own_kind = workload is not None and batches.is_own_kind(workload)
    whole = together([*([batches.source()] if own_kind else []), registry.source(setup)])
    always = ["import torch"] if own_kind else ["import torch", TREE_MAP]
    train = "\n".join(_train(config, device, whole, workload))
    return merged([*always, *whole.imports]), [*dict.fromkeys(whole.functions), train]


def train_arguments(config: StepConfig, workload: Workload | None) -> list[str]:
    """Return the functions that `train` takes after the device: of a workload or of a config."""
    made = workload is not None and workload.make_optimizer is not None
    own = ["make_optimizer"] * (made or config.has_own_optimizer)
    if workload is None:
        return own
    has_terms = _is_weighted(config, workload) and workload.num_loss_terms is not None
    split = ["split_batch"] * batches.is_own_kind(workload)
    return split + ["num_loss_terms"] * has_terms + own


def _docstring(config: StepConfig) -> str:
    settings = in_docstring(str(config)).replace(", ", "\n    ")
    return f'"""Plain PyTorch, written by memlab, for:\n\n    {settings}\n"""'


def _train(
    config: StepConfig, device: torch.device, source: ScriptLines, workload: Workload | None
) -> list[str]:
    more = train_arguments(config, workload)
    is_sharded = config.sharding is not Sharding.NONE
    loss = "mean_of_ranks(float(total), device)" if is_sharded else "float(total)"
    own = ", and computes its part" * sharding_source.divides_batch(config)
    arguments = ", ".join(["build_model", "batches", "compute_loss", "device", *more])
    said = f"structure of CPU tensors with its samples along dim 0, {config.batch_size} of them;"
    if workload is not None and batches.is_own_kind(workload):
        said = f"kind of {config.batch_size} samples that split_batch(batch, sizes) takes apart;"
    return [
        f"def train({arguments}):",
        '    """Train a new model, one update for each batch; return it and the losses.',
        "",
        f"    A batch is any {said}",
        "    compute_loss(model, batch) is the mean over the samples.",
        *([f"    Every rank is given the same batches{own}."] * is_sharded),
        '    """',
        *_indented(
            [
                "device = torch.device(device)",
                *source.before,
                "model = build_model()",
                *source.built,
                *source.place,
                "model.train()",
                *source.model,
                "parameters = [p for p in model.parameters() if p.requires_grad]",
                *source.optimizer,
                "losses = []",
                "for batch in batches:",
                *_indented(source.batch),
                *_indented(_accumulate(config, device, source, workload)),
                *_indented(source.update),
                "    optimizer.zero_grad(set_to_none=True)",
                f"    losses.append({loss})",
                *source.after,
                "return model, losses",
            ]
        ),
    ]


def _accumulate(
    config: StepConfig, device: torch.device, source: ScriptLines, workload: Workload | None
) -> list[str]:
    """Return the loop over the micro-batches of one update."""
    forward = ["loss = compute_loss(model, micro_batch)"]
    for context in reversed(source.contexts):
        forward = _inside(context, forward)
    backward = list(source.backward)
    for context in reversed(source.backward_contexts):
        backward = _inside(context, backward)
    # read where reading is free; on an accelerator it would stall the queue of kernels
    value = "loss.item()" if device.type == "cpu" else "loss.detach()"
    is_weighted = _is_weighted(config, workload)
    added = f"total + weight * {value}" if is_weighted else value
    if not is_weighted:
        backward = [line.replace("(loss * weight)", "loss") for line in backward]
    body = [*forward, f"total = {added}", *backward, "del loss, micro_batch"]
    for context in reversed(source.around):
        body = _inside(context, body)

    divides = sharding_source.divides_batch(config)
    first = (sharding_source.part_lines if divides else accumulation.lines)(config, workload)
    return ["total = 0.0", *first, *_indented(body)] if is_weighted else [*first, *body]


def _is_weighted(config: StepConfig, workload: Workload | None) -> bool:
    """Return whether there is a loop over micro-batches with weights."""
    if sharding_source.divides_batch(config):
        return sharding_source.has_weight(config, workload)
    return config.accumulation_steps > 1


def _inside(context: str, lines: list[str]) -> list[str]:
    """Return lines in a context; a comment among the contexts stays a comment."""
    if context.startswith("#"):
        return [context, *lines]
    return [f"with {context}:", *_indented(lines)]


def _indented(lines: tuple[str, ...] | list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]
