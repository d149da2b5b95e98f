"""`RunSpec`: a run as it is asked for, what its step is built from, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.config import StepConfig
from memlab.prediction.run_result import RunResult
from memlab.prediction.run_settings import CacheKind, TrainingRun
from memlab.result import Outcome, Source
from memlab.techniques.compilation import is_compiled
from memlab.techniques.step import Step, build_step, notes
from memlab.techniques.technique import Plan
from memlab.trace import Phase
from memlab.workload import Workload

# What a reader of the numbers of a run must know: sentences for the notes of a `RunResult`.


def notes_of_run(config: StepConfig, run: TrainingRun, *, is_cpu: bool) -> tuple[str, ...]:
    """Return the sentences of a run that was measured or predicted."""
    found = []
    if is_compiled(config):
        found.append(
            "torch.compile compiles in the first step, and once more for evaluation. On a card the "
            "trials of kernels while it compiles take memory of their own, which only a run there "
            "shows; what the C++ compiler and its code take on a CPU is not seen."
        )
    evaluation, generation = run.evaluate, run.generate
    if evaluation is not None and evaluation.num_samples is None:
        found.append("All batches of the evaluation take the same, so a few of them are enough.")
    if evaluation is not None and evaluation.to_host_every is not None:
        found.append(
            f"What {evaluation.to_host_every} batches of the evaluation keep goes to the host; "
            "host memory is not counted."
        )
    if generation is not None and generation.cache is CacheKind.STATIC and not is_cpu:
        found.append(
            "generate of transformers compiles the decoding with a static cache on a card, which "
            "is not in these numbers: they are those of eager decoding."
        )
    if run.save:
        found.append(
            "Saving is that of memlab.training_step(...).save; torch.save of a card's tensors "
            "copies them to the host one by one, and takes nothing more on the card."
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunSpec:
    """What a whole run is to be.

    Attributes:
        workload: what is trained.
        config: how.
        run: what is done beside the steps.
        seed: set before the model, the batch and each stage.
        memory_limit: bytes that each stage is compared with; on CUDA a measured run ends where it
            needs more.
        plan: of the config's memory budget.
    """

    workload: Workload
    config: StepConfig
    run: TrainingRun
    seed: int
    memory_limit: int | None
    plan: Plan | None = None

    def build(
        self,
        device: torch.device,
        mark: Callable[[Phase, int], None],
        workload: Workload | None = None,
    ) -> Step:
        """Return the step of the run on a device.

        Args:
            device: on which it is built.
            mark: called with each phase of the build.
            workload: the same over fake tensors; None for the run's own.
        """
        made_of = self.workload if workload is None else workload
        return build_step(made_of, self.config, device, plan=self.plan, seed=self.seed, mark=mark)

    def notes(self, device: torch.device) -> tuple[str, ...]:
        """Return what is known from the settings alone: of the techniques, and of the stages."""
        of_run = notes_of_run(self.config, self.run, is_cpu=device.type == "cpu")
        return (*notes(self.config, device, self.plan), *of_run)

    def result(
        self,
        outcome: Outcome,
        message: str,
        *,
        source: Source,
        device: str,
        versions: Mapping[str, str],
        **more: Any,
    ) -> RunResult:
        """Return the result of this run.

        Args:
            outcome: how it ended.
            message: one sentence.
            source: whether it ran.
            device: where it ran, or for which it was predicted.
            versions: that its numbers depend on.
            more: further fields.
        """
        return RunResult(
            outcome=outcome,
            message=message,
            source=source,
            device=device,
            versions=versions,
            config=self.config,
            run=self.run,
            workload_name=self.workload.name,
            memory_limit_bytes=self.memory_limit,
            **more,
        )
