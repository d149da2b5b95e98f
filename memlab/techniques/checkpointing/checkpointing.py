"""Activation checkpointing: which modules of a model are checkpointed, and what they keep.

A config or a plan names the modules; `recompute.py` checkpoints each of them. Left out: models that
checkpoint themselves, which are refused rather than checkpointed twice.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memlab._util.torch_private.tensors import OpOverload
from memlab.config import PRESET_POLICIES, BudgetEngine, Checkpointing, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing import policies
from memlab.techniques.checkpointing.checkpointing_source import source
from memlab.techniques.checkpointing.recompute import Key, wrap
from memlab.techniques.technique import (
    Control,
    Equivalence,
    Instance,
    Plan,
    Refusal,
    Region,
    Setup,
    Technique,
)

FLAGS = ("gradient_checkpointing", "grad_checkpointing")  # of transformers; of timm


def budget_refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse a budget of the eager engine together with another choice of what to recompute."""
    config = setup.config
    if not config.is_planned:
        return

    said = f"memory_budget={config.memory_budget:g} with budget_engine='eager'"
    if config.compile:
        yield Refusal(
            why=f"{said} plans eager steps only, and compile=True is set",
            remedies=({"budget_engine": BudgetEngine.COMPILE}, {"compile": False}),
        )

    if config.checkpointing is not Checkpointing.NONE:
        yield Refusal(
            why=f"{said} chooses itself what to recompute, and "
            f"checkpointing={str(config.checkpointing)!r} is set",
            remedies=({"checkpointing": Checkpointing.NONE}, {"memory_budget": 1.0}),
        )


def check_plan(config: StepConfig, plan: Plan | None) -> None:
    """Raise UnsupportedError for a budget of the eager engine without a plan."""
    if config.is_planned and plan is None:
        raise UnsupportedError(
            f"memory_budget={config.memory_budget:g} with budget_engine='eager' needs a plan. "
            "memlab.measure, predict and verify make one, build_step does not; for a step of your "
            "own use checkpointing='blocks', or budget_engine='compile'"
        )


def apply(model: nn.Module, config: StepConfig, *, compiled: bool) -> None:
    """Checkpoint the modules of a model that the config names, in place.

    Args:
        model: as built; nothing in it may be checkpointed already.
        config: says which modules are checkpointed and what they keep.
        compiled: whether `torch.compile` will trace the model. If so, PyTorch's own checkpoint is
            used: a compiled graph updates running statistics only once, and torch.compile cannot
            trace a context function.

    Raises:
        UnsupportedError: no module matches, or the model checkpoints itself.
        ConfigError: the policy names an operator that does not exist.
    """
    modules = policies.select(model, config.checkpoint_modules)
    keeps = policies.keeps(config.checkpoint_policy)
    if compiled and keeps is not None:
        raise UnsupportedError(
            f"checkpoint_policy={config.checkpoint_policy!r} with torch.compile is not "
            "implemented; use compile=False, or memory_budget with budget_engine='compile'"
        )

    _check(model)
    tally = _Tally(config)
    for path, module in modules.items():
        if compiled:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        else:
            wrap(path, module, keeps, tally.add)

    if not compiled:
        tally.judge_after_a_forward_of(model, list(modules))


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Checkpoint the regions of a plan, in place.

    Raises:
        UnsupportedError: the model checkpoints itself already.
    """
    _check(model)
    for region in plan.regions:
        module = model.get_submodule(region.path)
        keeps = functools.partial(_by_instance, region.keep) if region.keep else None
        wrap(region.path, module, keeps, functools.partial(_as_planned, region))


def notes(setup: Setup) -> list[str]:
    """Return a note about what a plan does and whether it is within its budget."""
    return [] if setup.plan is None else notes_of_plan(setup.config, setup.plan)


def notes_of_plan(config: StepConfig, plan: Plan) -> list[str]:
    """Return what a plan does for a config with a budget, and whether it is within that budget."""
    said = (
        f"{len(plan.regions)} modules are recomputed; by prediction {plan.share:.0%} of the plain "
        "step's activations are held."
    )
    if plan.share <= config.memory_budget:
        return [said]

    return [
        f"{said} This is the least that this model can hold, and more than "
        f"memory_budget={config.memory_budget:g} allows."
    ]


def _by_instance(instances: frozenset[Instance], func: OpOverload, number: int, *_: Any) -> bool:
    return (str(func), number) in instances


def _as_planned(region: Region, _: str, kept: Iterable[Key], __: Iterable[OpOverload]) -> None:
    """Raise UnsupportedError unless a forward has kept all outputs that its plan names."""
    missing = region.keep - {(str(func), number) for func, number in kept}
    if missing:
        name, number = min(missing)
        raise UnsupportedError(
            f"the plan keeps the output of {name} (number {number}) in {region.path}, which did "
            "not run it: the operators of this module differ from call to call; use "
            "checkpointing='blocks'"
        )


class _Tally:
    """Collects what the checkpointed modules of a model do in its first forward."""

    def __init__(self, config: StepConfig) -> None:
        self.config = config
        self.seen: set[OpOverload] = set()
        self.was_called = self.keeps_something = False

    def add(self, _: str, kept: Iterable[Key], seen: Iterable[OpOverload]) -> None:
        """Note one module's forward."""
        self.was_called = True
        self.keeps_something |= bool(list(kept))
        self.seen.update(seen)

    def judge_after_a_forward_of(self, model: nn.Module, paths: list[str]) -> None:
        """Make the first backward raise UnsupportedError if nothing is recomputed or kept.

        The first gradient of a parameter shows that the forward is over, however the loss calls
        the model.
        """

        def judge(_: torch.Tensor) -> None:
            for hook in hooks:
                hook.remove()
            if not self.was_called:
                raise UnsupportedError(
                    f"checkpoint_modules={self.config.checkpoint_modules!r} selects {paths[0]}, "
                    "but this model does not call its forward, so nothing is recomputed; select "
                    "a module around it, or use checkpointing='none'"
                )

            keeps_nothing = self.config.checkpoint_policy == "recompute-all"
            if not self.keeps_something and not keeps_nothing:
                raise UnsupportedError(
                    policies.nothing_kept(self.config.checkpoint_policy, self.seen)
                )

        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(judge) for p in trainable]


def _check(model: nn.Module) -> None:
    """Raise UnsupportedError if a module of the model checkpoints itself."""
    for path, module in model.named_modules():
        flag = next((flag for flag in FLAGS if getattr(module, flag, False) is True), None)
        if flag is None and type(module).__name__ == "CheckpointWrapper":
            flag = "checkpoint_wrapper"
        if flag:
            named = path or type(module).__name__
            raise UnsupportedError(
                f"{named} already checkpoints itself ({flag}); build the model without this, or "
                "use checkpointing='none' and memory_budget=1.0"
            )


KEPT = {
    "recompute-all": "only its input",
    "keep-matmuls": "its input and the outputs of matrix products",
    "keep-attention": "its input and the outputs of attention",
    "recompute-pointwise": "everything except the outputs of pointwise operators and norms",
}


def says(setup: Setup) -> str:
    """Return what it does now."""
    config = setup.config
    if config.checkpointing is Checkpointing.NONE:
        return ""
    kept = KEPT.get(str(config.checkpoint_policy), "what its policy chooses")
    return f"each repeated block keeps {kept}; the rest is recomputed"


CHECKPOINTING = Technique(
    fields=("checkpointing", "checkpoint_modules", "checkpoint_policy"),
    equivalence=Equivalence.BITWISE,
    does="recomputing",
    examples={"checkpointing": {"checkpointing": "blocks"}},
    source=source,
    controls=(
        Control(
            field="checkpointing",
            label="Checkpointing",
            named=lambda v: "no checkpointing" if v == "none" else f"checkpointed {v}",
        ),
        Control(
            field="checkpoint_policy",
            label="Blocks keep",
            offered=PRESET_POLICIES,
            only_with={"checkpointing": Checkpointing.BLOCKS},
        ),
    ),
    says=says,
)
BUDGET = Technique(
    fields=("memory_budget",),
    equivalence=Equivalence.BITWISE,
    does="recomputing",
    examples={"budget": {"memory_budget": 0.5}},
    changes_plans=False,  # the plans of all budgets are made at once
    refusals=budget_refusals,
    notes=notes,  # `source` of CHECKPOINTING writes its lines of a script
    controls=(
        Control(field="memory_budget", label="Memory budget", named=lambda v: f"budget {v:g}"),
    ),
)
