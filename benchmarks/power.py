"""How right predicted watts and the cost of a power limit are: `python -m benchmarks.power`.

Held against 929 epochs of five networks on an A40 and a V100 under limits from 100 W to the most
that the board may take (`benchmarks/data/power_epochs.csv`). A number is judged with shares that
were fitted to the other card, and with shares of both cards without its network; the shares of all
are what `memlab/cost_model/power.py` must hold. Four of the networks are rebuilt here, of which the
step's mix of kernels is predicted; the fifth, NCF, waits for its host nearly all the time and is
left out. Epochs hold loading and evaluation too, so only ratios of their times count; how long a
step of the two convnets took with that is shown beside what is predicted. The optimizers of the
data update one tensor after the other, as PyTorch did in 2022; here that is Adam.
"""

import collections
import csv
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import memlab
from benchmarks import report
from benchmarks.public_runs import options_with_packages, use_packages
from memlab.cost_model import power
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import resolve

DATA = Path(__file__).resolve().parent / "data" / "power_epochs.csv"
WORKING = 0.9  # of a step's time in products and kernels that wait for memory
IMAGES = {"cifar100": 50_000, "imagenet": 1_281_167}  # of an epoch
CARDS = {"a40": "a40", "v100": "v100-pcie-32"}
Array = npt.NDArray[np.float64]
Fit = Callable[[Array], Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """One setting under each limit.

    Attributes:
        card: of the data.
        network: of the data.
        batch_size: samples a step.
        mix: shares of a predicted step's time: compute, memory, recurrent, waiting; (4,).
        limits: of the power, as shares of the board's; the last is the board's.
        slower: seconds of an epoch over those without a lower limit.
        drawn: mean power, as shares of the board's.
        step_ms: predicted.
        took_ms: of an epoch without a lower limit, over its steps; nan if these are not known.
    """

    card: str
    network: str
    batch_size: int
    mix: Array
    limits: Array
    slower: Array
    drawn: Array
    step_ms: float = math.nan
    took_ms: float = math.nan


class DeepSpeech(nn.Module):
    """Convolutions, five recurrent layers in both directions, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.recurrent = nn.LSTM(32 * 41, 1024, 5, bidirectional=True)
        self.head = nn.Linear(2048, 29)

    def forward(self, sounds: torch.Tensor) -> torch.Tensor:
        """(n, 1, 161, time) -> (n, 29)."""
        x = self.convolutions(sounds).flatten(1, 2).permute(2, 0, 1)
        return self.head(self.recurrent(x)[0]).mean(0)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_labels=2))


def _logits(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(batch[0])
    return nn.functional.cross_entropy(getattr(found, "logits", found), batch[1])


def _images(size: int, classes: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, size, size), torch.randint(classes, (n,))


def _texts(length: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(30_000, (n, length)), torch.randint(2, (n,))


def _sounds(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 1, 161, 800), torch.randint(29, (n,))


def _shufflenet() -> nn.Module:
    """Return that of weiaicunzai/pytorch-cifar100: for images of 32 pixels, with biases."""
    from torchvision import models  # of the packages

    model = models.shufflenet_v2_x1_0(num_classes=100)
    model.conv1 = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24))
    model.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(torch.zeros(module.out_channels))
    return model


def workload_of(network: str, dataset: str) -> memlab.Workload:
    """Return a network of the data."""
    from torchvision import models  # of the packages

    length = 384 if dataset == "squad" else 128
    build, batch = {
        "bert_base_uncased": (_bert, functools.partial(_texts, length)),
        "resnet50": (models.resnet50, functools.partial(_images, 224, 1000)),
        "shufflenetv2": (_shufflenet, functools.partial(_images, 32, 100)),
        "deepspeech2": (DeepSpeech, _sounds),
    }[network]
    return memlab.Workload(name=network, build_model=build, make_batch=batch, compute_loss=_logits)


@functools.cache
def mix_of(card: str, network: str, dataset: str, batch_size: int) -> tuple[float, ...]:
    """Return the milliseconds of a predicted step, and their shares by what draws power."""
    config = memlab.StepConfig(batch_size=batch_size, optimizer_implementation="single-tensor")
    found = from_traced_step(
        _mix, workload_of(network, dataset), config, resolve(CARDS[card]), seed=0,
        report=lambda _: None, purpose="for its power",
    )  # fmt: skip
    if isinstance(found, Failure):
        raise RuntimeError(f"{network} at {batch_size}: {found.message}")
    return found


def _mix(step: TracedStep) -> tuple[float, ...]:
    kernels = step.kernels()
    assert kernels.overlap is not None
    milliseconds = 1e3 * kernels.overlap.step_seconds
    own = [interval.step >= 0 for interval in step.program.recording.intervals]
    seconds, busy = float(kernels.overlap.interval_seconds[own].sum()), kernels.busy
    known = [part / seconds for part in (busy.compute, busy.memory, busy.recurrent)]
    return (milliseconds, *known, max(1 - sum(known), 0.0))


def read(every: int = 1) -> list[Epochs]:
    """Return every so many settings of the data."""
    rows = collections.defaultdict(list)
    with DATA.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["network"] != "ncf":
                names = ("card", "network", "dataset", "batch_size", "optimizer")
                rows[tuple(row[name] for name in names)].append(row)
    found = []
    for (card, network, dataset, batch_size, _), of_limit in list(rows.items())[::every]:
        board = resolve(CARDS[card]).card.board_watts
        of_limit.sort(key=lambda row: float(row["limit_watts"]))
        columns = ("limit_watts", "epoch_seconds", "mean_watts")
        watts, seconds, drawn = (np.array([float(r[c]) for r in of_limit]) for c in columns)
        if watts[-1] < board:
            continue
        step_ms, *mix = mix_of(card, network, dataset, int(batch_size))
        images = IMAGES.get(dataset)
        steps = math.ceil(images / int(batch_size)) if images else math.nan
        found.append(Epochs(
            card=card, network=network, batch_size=int(batch_size), mix=np.array(mix),
            limits=watts / board, slower=seconds / seconds[-1], drawn=drawn / board,
            step_ms=step_ms, took_ms=float(1e3 * seconds[-1] / steps),
        ))  # fmt: skip
    return found


def times(given: Sequence[Epochs]) -> list[dict[str, Any]]:
    """Return what a step took with its loading and evaluation, beside what is predicted."""
    return [
        {"card": one.card, "network": one.network, "batch": one.batch_size,
         "took ms": one.took_ms, "predicted ms": one.step_ms,
         "off %": 100 * (one.step_ms / one.took_ms - 1)}
        for one in given
        if not math.isnan(one.took_ms)
    ]  # fmt: skip


def fitted(given: Sequence[Epochs]) -> Array:
    """Return the shares drawn that suit these settings best, each network and card alike; (4,)."""
    of = collections.Counter((one.card, one.network) for one in given)
    weight = np.array([of[one.card, one.network] ** -0.5 / one.drawn[-1] for one in given])
    mixes, drawn = np.array([one.mix for one in given]), np.array([one.drawn[-1] for one in given])
    has = mixes.sum(0) > 0
    shares = np.full(4, np.nan)
    shares[has] = np.linalg.lstsq(mixes[:, has] * weight[:, None], drawn * weight, rcond=None)[0]
    return shares


def drawn_by(shares: Array, one: Epochs) -> float:
    """Return the predicted draw of a setting without a limit."""
    return float(np.nansum(shares * one.mix))


def left_out(given: Sequence[Epochs], of: str) -> list[tuple[Epochs, Array]]:
    """Return each setting with the shares of those of another card, or another network.

    A network is left out if others tell what it draws power for: one alone has recurrent layers,
    and one alone waits for its host.
    """
    found = []
    for name in sorted({getattr(one, of) for one in given}):
        own = [one for one in given if getattr(one, of) == name]
        if of == "card" or np.mean([one.mix[:2].sum() for one in own]) > WORKING:
            shares = fitted([one for one in given if getattr(one, of) != name])
            found += [(one, shares) for one in own]
    return found


def errors_of_power(pairs: Sequence[tuple[Epochs, Array]]) -> Array:
    """Return predicted over measured mean power, less 1, without a limit."""
    return np.array([drawn_by(shares, one) / one.drawn[-1] - 1 for one, shares in pairs])


@dataclass(frozen=True, kw_only=True, slots=True)
class Limited:
    """One setting under one limit: times as long, and the power, measured and predicted."""

    one: Epochs
    limit: float
    slower: tuple[float, float]
    drawn: tuple[float, float]


def under_limits(pairs: Sequence[tuple[Epochs, Array]]) -> list[Limited]:
    """Return every setting under each limit below the board's."""
    found = []
    for one, shares in pairs:
        draws = drawn_by(shares, one)
        for limit, slower, drawn in list(zip(one.limits, one.slower, one.drawn, strict=True))[:-1]:
            predicted = (power.slowdown(limit, draws) - 1) * float(one.mix[:3].sum()) + 1
            found.append(Limited(
                one=one, limit=float(limit), slower=(float(slower), predicted),
                drawn=(float(drawn), min(draws, float(limit))),
            ))  # fmt: skip
    return found


def judged(name: str, found: Array) -> dict[str, Any]:
    """Return a line of a table: how far off these relative errors are."""
    size = np.abs(found)
    return {
        "what": name, "settings": len(found), "median %": 100 * float(np.median(size)),
        "9 of 10 within %": 100 * float(np.quantile(size, 0.9)),
        "bias %": 100 * float(np.mean(found)),
    }  # fmt: skip


def of_kinds(pairs: Sequence[tuple[Epochs, Array]], of: str) -> list[dict[str, Any]]:
    """Return the errors of power, of times under limits and of the energy, by what was left out."""
    found = []
    for name in sorted({getattr(one, of) for one, _ in pairs}):
        own = [pair for pair in pairs if getattr(pair[0], of) == name]
        found.append(judged(f"{name}: watts without a limit", errors_of_power(own)))
        limited = under_limits(own)
        for least, most in itertools.pairwise((0.0, 0.5, 0.7, 1.0)):
            some = [each for each in limited if least <= each.limit < most]
            if not some:
                continue
            within = f"limit {least:.0%} to {most:.0%}"
            times = np.array([each.slower[1] / each.slower[0] - 1 for each in some])
            energy = np.array(
                [
                    (each.slower[1] * each.drawn[1]) / (each.slower[0] * each.drawn[0]) - 1
                    for each in some
                ]
            )
            found.append(judged(f"{name}: time, {within}", times))
            found.append(judged(f"{name}: joules, {within}", energy))
    return found


def coverage(pairs: Sequence[tuple[Epochs, Array]]) -> dict[str, float]:
    """Return how often the stated half-widths hold, and how wide they are in the median."""
    off = np.array([abs(one.drawn[-1] / drawn_by(shares, one) - 1) for one, shares in pairs])
    widths = np.array([power.Busy(*one.mix[:3]).half_width(1.0) for one, _ in pairs])
    is_working = np.array([one.mix[:2].sum() > WORKING for one, _ in pairs])
    limited = [each for each in under_limits(pairs) if each.slower[1] > 1]
    times = np.array([abs(each.slower[0] / each.slower[1] - 1) for each in limited])
    slower = np.array(
        [
            power.LEAST_WIDTH + power.SLOWER_WIDTH * (each.slower[1] - 1) / each.slower[1]
            for each in limited
        ]
    )
    return {
        "watts %": 100 * float((off <= widths).mean()),
        "of working cards %": 100 * float((off <= widths)[is_working].mean()),
        "median width %": 100 * float(np.median(widths)),
        "times %": 100 * float((times <= slower).mean()),
        "their median width %": 100 * float(np.median(slower)),
    }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def main() -> None:
    """Print how far off watts and slower steps are."""
    given = options_with_packages(__file__, __doc__ or "")
    before = report.environment()
    use_packages(given.packages)
    every = read(10 if given.quick else 1)
    shares = fitted(every)
    names = ("compute", "memory", "recurrent", "waiting")
    now = (power.COMPUTE, power.MEMORY, power.RECURRENT, power.WAITING)
    table = [
        {"share drawn": name, "fitted to all": float(found), "in use": used}
        for name, found, used in zip(names, shares, now, strict=True)
    ]
    report.show("shares of the board's power", table)
    report.show("steps of convnets, with loading and evaluation", times(every))
    kept = ("card", "network", "batch_size", "mix", "limits", "slower", "drawn")
    rows = [{name: _plain(getattr(one, name)) for name in kept} for one in every]
    found: dict[str, Any] = {"shares": table, "settings": rows, "steps": times(every)}
    for of in ("card", "network"):
        pairs = left_out(every, of)
        found[of] = of_kinds(pairs, of)
        report.show(f"the {of} left out", found[of])
        found[f"{of} coverage"] = coverage(pairs)
        report.show(f"the {of} left out: how many lie within", [found[f"{of} coverage"]])
    report.write(report.Options(quick=given.quick, out=given.out), before, found)


if __name__ == "__main__":
    main()
