"""The optimizer inside of backward: each gradient is used and freed as soon as it is computed.

Source: the PyTorch tutorial "How to save memory by fusing the optimizer step into the backward
pass". Each parameter has an optimizer of its own, which a hook calls once the parameter's gradient
has been accumulated. A shared parameter is updated once, after all its uses. Left out: everything
that needs all gradients at once, such as clipping by their norm.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from memlab.config import Precision
from memlab.errors import UnsupportedError
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Equivalence, Refusal, Setup, Technique, switch
from memlab.trace import Phase

HOOKS = '''
def update_in_backward(optimizer, make_one):
    """Let each parameter be updated, and its gradient freed, as soon as backward has it."""
    optimizer.of_each = {p: make_one([p]) for p in optimizer.param_groups[0]["params"]}
    held = weakref.ref(optimizer)  # no garbage collector sees what a hook holds of its tensor

    def hook(parameter):
        own = held().of_each[parameter]
        {rate}own.step()
        torch.autograd.graph.increment_version(parameter)  # a fused kernel tells nobody
        parameter.grad = None

    for parameter in optimizer.of_each:
        parameter.register_post_accumulate_grad_hook(hook)
'''.strip()


def refusals(setup: Setup) -> Iterator[Refusal]:
    """Refuse settings that need the gradients after backward."""
    config = setup.config
    if not config.optimizer_in_backward:
        return

    after = {"optimizer_in_backward": False}
    if config.accumulation_steps > 1:
        yield Refusal(
            why=f"optimizer_in_backward=True with accumulation_steps={config.accumulation_steps}: "
            "the backward of each micro-batch would update the weights",
            remedies=({"accumulation_steps": 1}, after),
        )

    if config.precision is Precision.FP16_MIXED:
        yield Refusal(
            why="optimizer_in_backward=True with precision='fp16-mixed': the loss scaler must see "
            "all gradients before any weight is updated, and bf16-mixed needs no loss scaler",
            remedies=({"precision": Precision.BF16_MIXED}, after),
        )


class InBackward(torch.optim.Optimizer):
    """Updates each parameter in a hook of backward.

    Args:
        parameters: the trainable parameters, each once.
        make_one: makes the optimizer of one parameter.
        learning_rate: of all parameters, until a schedule sets another; None is what each
            optimizer has by itself.

    Attributes:
        of_each: the optimizers of the single parameters, in the order of the parameters.
        on_phase: called around each update with the phase that begins.
        on_gradient: called with each parameter before its update, which frees its gradient.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        make_one: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        learning_rate: float | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": learning_rate})
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self.on_gradient: Callable[[torch.Tensor], None] = lambda parameter: None
        self._updated: set[int] = set()
        self.of_each = [make_one([parameter]) for parameter in parameters]
        myself = weakref.ref(self)  # the garbage collector cannot see a cycle through a hook

        for parameter, own in zip(parameters, self.of_each, strict=True):
            self.state.update(own.state)
            own.state = self.state
            hook = partial(_update, myself, weakref.ref(own))
            parameter.register_post_accumulate_grad_hook(hook)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End an update. Backward has already made it."""
        self._updated.clear()

    def update(self, own: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """Update one parameter and free its gradient.

        Raises:
            UnsupportedError: this backward has updated it before.
        """
        if id(parameter) in self._updated:
            raise UnsupportedError(
                f"optimizer_in_backward=True: a parameter of shape {tuple(parameter.shape)} gets "
                "its gradient in two parts, as in a model that runs backward inside backward "
                "(checkpoint with use_reentrant=True); use optimizer_in_backward=False"
            )

        self._updated.add(id(parameter))
        self.on_gradient(parameter)
        self.on_phase(Phase.OPTIMIZER)
        if (rate := self.param_groups[0]["lr"]) is not None:
            for group in own.param_groups:
                group["lr"] = rate
        own.step()
        # a fused kernel does not raise the version, and a backward that still needs the old
        # weight must fail
        torch.autograd.graph.increment_version(parameter)
        parameter.grad = None
        self.on_phase(Phase.BACKWARD)


def _update(
    optimizer: "weakref.ref[InBackward]",
    own: "weakref.ref[torch.optim.Optimizer]",
    parameter: torch.Tensor,
) -> None:
    whole, one = optimizer(), own()
    if whole is not None and one is not None:
        whole.update(one, parameter)


def source(made: str, learning_rate: float | None) -> ScriptLines:
    """Return the hooks of a script.

    Args:
        made: the expression that makes an optimizer of the parameters `own`.
        learning_rate: of all parameters, until a schedule sets another; None is their own.
    """
    held = "the learning rate for all" if learning_rate is not None else "the parameters alone"
    rate = 'own.param_groups[0]["lr"] = held().param_groups[0]["lr"]\n        '
    return ScriptLines(
        imports=("import weakref",),
        functions=(HOOKS.replace("{rate}", "" if learning_rate is None else rate),),
        optimizer=(
            f"# it holds {held}; its own step finds no gradients",
            f"optimizer = torch.optim.SGD(parameters, lr={learning_rate or 0.0})",
            f"update_in_backward(optimizer, lambda own: {made})",
        ),
    )


def says(setup: Setup) -> str:
    """Return what it does now."""
    is_on = setup.config.optimizer_in_backward
    return "each gradient is used and freed during backward" if is_on else ""


IN_BACKWARD = Technique(
    fields=("optimizer_in_backward",),
    equivalence=Equivalence.NUMERICAL,
    examples={"in backward": {"optimizer_in_backward": True}},
    refusals=refusals,  # `optimizers.source` writes its lines of a script
    controls=(
        switch(
            "optimizer_in_backward",
            "update in backward",
            "optimizer in backward",
            "optimizer after backward",
        ),
    ),
    says=says,
)
