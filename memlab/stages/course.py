"""The course of a run: its stages one after the other, on real or on fake tensors.

    number  name            what happens
     -1     build           model, optimizer, batch; averaged weights
      0     first step      the optimizer's state is made
      1     EMA update      of the averaged weights, with `ema`
      2     step            like all later ones
      3     EMA update
      4     evaluation      if asked for, like the next two
      5     generation
      6     saving
      7     step afterwards if there was any of these

A stage that is left out has no number. Each stage draws from the seed, so that evaluation and
generation change nothing in the steps after them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from memlab.errors import UnsupportedError
from memlab.stages.evaluating import evaluate
from memlab.stages.generating import generate
from memlab.stages.run_settings import TrainingRun
from memlab.step import Step
from memlab.trace import Phase

EMA_COPY = 1  # the number of the micro-batch of the interval in which averaged weights are made
DECAY = 0.999  # it changes no size


class StageName(StrEnum):
    """The stages of a run, in their order."""

    BUILD = "build"
    FIRST_STEP = "first step"
    STEP = "step"
    EMA_UPDATE = "EMA update"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVING = "saving"
    STEP_AFTERWARDS = "step afterwards"


def names_of(run: TrainingRun) -> list[StageName]:
    """Return the names of the stages after the build, by number."""
    update = [StageName.EMA_UPDATE] if run.ema else []
    between = [
        name
        for name, is_asked in (
            (StageName.EVALUATION, run.evaluate is not None),
            (StageName.GENERATION, run.generate is not None),
            (StageName.SAVING, run.save),
        )
        if is_asked
    ]
    after = [StageName.STEP_AFTERWARDS] if between else []
    return [StageName.FIRST_STEP, *update, StageName.STEP, *update, *between, *after]


def course(
    step: Step,
    run: TrainingRun,
    mark: Callable[[int, Phase, int], None],
    *,
    seed: int,
    num_new_tokens: int,
    num_batches: int,
    save: Callable[[], Any],
    stepped: Callable[[], Any],
    begin: Callable[[StageName], Any] = lambda name: None,
) -> None:
    """Run all stages of a step that was built.

    Args:
        step: of the workload.
        run: what is done beside the steps.
        mark: called with the number of a stage, a phase, and a micro-batch, batch or token.
        seed: set before each stage.
        num_new_tokens: of those that are to be generated; the others are like them.
        num_batches: of those that are to be evaluated; the others are like them.
        save: writes a checkpoint.
        stepped: called after each update.
        begin: called when a stage begins.
    """
    average = _averaged(step, mark) if run.ema else None

    def train(number: int) -> None:
        step(partial(mark, number))
        stepped()

    def update(number: int) -> None:
        assert average is not None
        mark(number, Phase.FORWARD, 0)
        average.update_parameters(step.model)

    def evaluation(number: int) -> None:
        assert run.evaluate is not None
        evaluate(step, run.evaluate, num_batches, partial(mark, number))

    def generation(number: int) -> None:
        assert run.generate is not None
        generate(step, run.generate, num_new_tokens, partial(mark, number))

    def saving(number: int) -> None:
        mark(number, Phase.FORWARD, 0)
        save()

    does = {
        StageName.EMA_UPDATE: update,
        StageName.EVALUATION: evaluation,
        StageName.GENERATION: generation,
        StageName.SAVING: saving,
    }
    for number, name in enumerate(names_of(run)):
        gc.collect()  # a library may leave cycles, which Python would free at some later time
        begin(name)
        step.set_seed(seed)
        does.get(name, train)(number)


def _averaged(step: Step, mark: Callable[[int, Phase, int], None]) -> AveragedModel:
    """Return averaged weights, as scripts make them: of the model on its device.

    Raises:
        UnsupportedError: the weights are codes, whose average is no average of the weights.
    """
    formats = {p.dtype for p in step.model.parameters() if not p.is_floating_point()}
    if formats:
        found = " and ".join(sorted(str(each).removeprefix("torch.") for each in formats))
        raise UnsupportedError(
            f"ema: the model has quantized weights ({found}), whose codes AveragedModel would "
            "average as numbers; use ema=False, or a base that is not quantized"
        )
    mark(-1, Phase.BUILD, EMA_COPY)
    made = AveragedModel(step.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    mark(-1, Phase.BUILD, 0)
    return made
