"""The operators of the training steps of `benchmarks/data/timm_rtx3090.csv`, recorded and kept.

A step is recorded over fake tensors for an RTX 3090, which takes half a minute or more, and the
distinct operators of it are kept in a folder with their counts, so that a fit takes seconds.
"""

import csv
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from memlab.config import StepConfig
from memlab.cost_model.roofline import Work, work_of
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices import cards
from memlab.devices.cards import Target
from memlab.devices.operators import Signature, TensorSpec
from memlab.tracing.program import Program
from memlab.workload import Workload

FILE = Path(__file__).parent / "data" / "timm_rtx3090.csv"
FOLDER = Path("build/timm_operators")
CARD = "rtx-3090"
FUSED_ATTENTION = "TIMM_FUSED_ATTN"  # PyTorch 1.12 had none
Ran = tuple[Signature, tuple[TensorSpec, ...], int]


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step: seconds, and the work of its distinct operators with their numbers."""

    model: str
    layout: str
    seconds: float
    works: list[tuple[Work, int]]


def rows(path: Path = FILE) -> list[dict[str, str]]:
    """Return the rows of the file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read(folder: Path = FOLDER) -> list[Step]:
    """Return the steps that are kept, without those that were not recorded as they were measured.

    Raises:
        FileNotFoundError: there is none.
    """
    steps, known = [], rows()
    for path in sorted(folder.glob("*.pkl")):
        row = known[int(path.stem)]
        operators: list[Ran] = pickle.loads(path.read_bytes())
        if not _is_as_measured(row, operators):
            continue
        works = [(work_of(signature, outputs), n) for signature, outputs, n in operators]
        works = [(work, n) for work, n in works if work.num_bytes]
        steps.append(Step(row["model"], row["layout"], float(row["step_ms"]) / 1e3, works))
    if not steps:
        raise FileNotFoundError(
            f"{folder} holds no steps; python -m benchmarks.timm_steps records them"
        )
    return steps


def _is_as_measured(row: dict[str, str], operators: Sequence[Ran]) -> bool:
    """Return whether attention is not fused, and images are in the layout of the row.

    A convolution of images that are not channels-last, with a weight of 1 x 1, gives tensors that
    are not either, and so do all that follow.
    """
    if any("scaled_dot_product" in signature[0] for signature, _, _ in operators):
        return False
    if row["layout"] != "nhwc":
        return True
    of_images = [
        outputs[0]
        for signature, outputs, _ in operators
        if signature[0] == "aten.convolution.default" and signature[1][0].shape[1] == 3
    ]
    return all(output.stride[1] == 1 for output in of_images)


def recorded(row: dict[str, str], make: Callable[[TracedStep], Any]) -> Any:
    """Return what `make` says of the recorded step of a row, or a `Failure`."""
    import timm

    os.environ[FUSED_ATTENTION] = "0"
    image, batch, is_last = int(row["img"]), int(row["batch"]), row["layout"] == "nhwc"

    def build() -> torch.nn.Module:
        try:
            model = timm.create_model(row["model"], num_classes=1000, img_size=image)
        except TypeError:  # convnets take no size
            model = timm.create_model(row["model"], num_classes=1000)
        assert isinstance(model, torch.nn.Module)
        return model

    def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.empty(size, 3, image, image)
        if is_last:  # as benchmark.py of timm
            images = images.contiguous(memory_format=torch.channels_last)
        return images, torch.zeros(size, dtype=torch.long)

    workload = Workload(
        name=row["model"],
        build_model=build,
        make_batch=make_batch,
        compute_loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    )
    config = StepConfig(
        batch_size=batch,
        precision="fp16-mixed",
        optimizer="sgd-momentum",
        channels_last=is_last,
    )
    target = Target(kind="cuda", card=cards.card(CARD), name=CARD)
    return from_traced_step(
        make, workload, config, target, seed=0, report=lambda progress: None, purpose="to fit times"
    )


def keep(number: int, program: Program, folder: Path) -> None:
    """Write the distinct operators of a recorded step."""
    folder.mkdir(parents=True, exist_ok=True)
    counted = Counter(operators_of(program))
    found: list[Ran] = [(*key, count) for key, count in counted.items()]
    (folder / f"{number:04d}.pkl").write_bytes(pickle.dumps(found, protocol=5))


def operators_of(program: Program) -> Iterator[tuple[Signature, tuple[TensorSpec, ...]]]:
    """Yield the operators of the step that begins with optimizer state."""
    recording = program.recording
    for operator in recording.operators:
        is_of_step = recording.intervals[operator.interval].step == 1
        if is_of_step and operator.signature is not None and not operator.crosses:
            yield operator.signature, operator.outputs


__all__ = ["CARD", "FOLDER", "Failure", "Step", "keep", "operators_of", "read", "recorded", "rows"]
