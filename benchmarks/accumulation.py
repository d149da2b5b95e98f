"""Does `recommend(exact=True)` offer micro-batches only where they train the same?

Each loss, or model, of `LOSSES` is asked for at a limit that the undivided step does not fit. What
is offered with micro-batches is given to `memlab.verify`, which compares its gradient with that of
the whole batch. Goal: no answer that verify calls another gradient. Where nothing is offered,
verify is asked for two micro-batches: a refusal of what has the same gradient is over-cautious.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memlab
from benchmarks import report
from memlab import StepConfig, Workload

BATCH, CLASSES, WIDTH, TOKENS = 32, 8, 16, 12
SHARE = 0.9  # of the undivided step's peak, which is the limit
IGNORED = -100
WEIGHTS = torch.linspace(0.2, 3, CLASSES)
NUM_QUICK = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload, and whether its micro-batches give the gradient of the whole batch."""

    workload: Workload
    same: str


def mlp(classes: int = CLASSES) -> nn.Module:
    """Return two layers."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, classes))


class Towers(nn.Module):
    """Two encoders of one space."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(), mlp()

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unit vectors of both."""
        return nn.functional.normalize(self.image(image), dim=1), nn.functional.normalize(
            self.text(text), dim=1
        )


class Experts(nn.Module):
    """A mixture of experts, with its loss that balances their load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and the loss of the load."""
        shares = self.gate(x).softmax(-1)
        outputs = sum(shares[:, i : i + 1] * one(x) for i, one in enumerate(self.experts))
        load = nn.functional.one_hot(shares.argmax(-1), 4).float().mean(0)
        return outputs, 4 * (load * shares.mean(0)).sum()


def language_model() -> nn.Module:
    """Return an embedding and a head."""
    return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50))


def segmenter() -> nn.Module:
    """Return two convolutions."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 1))


def normalised() -> nn.Module:
    """Return a model with BatchNorm."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))


def classes(n: int) -> Any:
    """Return samples with a class each."""
    return torch.randn(n, WIDTH), torch.randint(0, CLASSES, (n,))


def pairs(n: int) -> Any:
    """Return pairs of samples."""
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH)


def shares(n: int) -> Any:
    """Return samples with a distribution each."""
    return torch.randn(n, WIDTH), torch.randn(n, CLASSES).softmax(-1)


def tokens(n: int) -> Any:
    """Return sequences of which another number of labels is ignored each."""
    ids = torch.randint(0, 50, (n, TOKENS))
    ignored = torch.arange(TOKENS) < torch.randint(0, TOKENS - 1, (n, 1))
    return ids, ids.masked_fill(ignored, IGNORED)


def masks(n: int) -> Any:
    """Return images with masks of unlike areas."""
    return torch.randn(n, 3, 8, 8), (torch.rand(n, 1, 8, 8) > torch.rand(n, 1, 1, 1)).float()


def boxes(n: int) -> Any:
    """Return samples of twelve boxes, of which another number is positive each, at least one."""
    positive = (torch.rand(n, 12) > torch.rand(n, 1)) | (torch.arange(12) == 0)
    return torch.randn(n, 12, WIDTH), positive.long()


def texts(n: int) -> Any:
    """Return twenty frames with a text each, and its length."""
    return torch.randn(n, 20, WIDTH), torch.randint(1, 8, (n, 6)), torch.randint(2, 7, (n,))


def clip(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the contrastive loss of pairs."""
    image, text = model(*batch)
    logits, own = 10 * image @ text.T, torch.arange(len(image))
    return (
        nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.T, own)
    ) / 2


def simclr(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the NT-Xent loss of two views."""
    z, n = nn.functional.normalize(torch.cat([model(view) for view in batch]), dim=1), len(batch[0])
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return nn.functional.cross_entropy(logits, torch.arange(2 * n).roll(n))


def of_labels(model: nn.Module, batch: Any, **options: Any) -> torch.Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], **options)


def of_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross-entropy of the labels that are not ignored."""
    return nn.functional.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED
    )


def dice(model: nn.Module, batch: Any, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the Dice loss over these dimensions."""
    found, mask = model(batch[0]).sigmoid(), batch[1]
    both, either = (found * mask).sum(dims), found.sum(dims) + mask.sum(dims)
    return (1 - (2 * both + 1) / (either + 1)).mean()


def focal(model: nn.Module, batch: Any, *, by_positives: bool) -> torch.Tensor:
    """Return the focal loss, a mean or divided by the number of positives."""
    each = nn.functional.cross_entropy(
        model(batch[0]).flatten(0, -2), batch[1].flatten(), reduction="none"
    )
    each = (1 - (-each).exp()) ** 2 * each
    return each.sum() / batch[1].sum() if by_positives else each.mean()


def ctc(model: nn.Module, batch: Any, reduction: str) -> torch.Tensor:
    """Return the CTC loss."""
    scores = model(batch[0]).log_softmax(-1).transpose(0, 1)
    frames = torch.full((len(batch[2]),), 20)
    return nn.functional.ctc_loss(scores, batch[1], frames, batch[2], reduction=reduction)


def mixup(model: nn.Module, batch: Any, *, drawn: bool) -> torch.Tensor:
    """Return the loss of samples that are mixed with others of their batch."""
    x, y = batch
    other = torch.randperm(len(x)) if drawn else torch.arange(len(x)).roll(1)
    scores = model(0.7 * x + 0.3 * x[other])
    return 0.7 * nn.functional.cross_entropy(scores, y) + 0.3 * nn.functional.cross_entropy(
        scores, y[other]
    )


def triplet(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the batch-hard triplet loss."""
    z, same = model(batch[0]), batch[1][:, None] == batch[1]
    apart = torch.cdist(z, z)
    return nn.functional.relu((apart * same).amax(1) - (apart + 1e6 * same).amin(1) + 0.5).mean()


def vicreg(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss that keeps the variance over the batch up."""
    first, second = (model(view) for view in batch)
    return (
        nn.functional.mse_loss(first, second)
        + nn.functional.relu(1 - (first.var(0) + 1e-4).sqrt()).mean()
    )


def barlow(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the Barlow twins loss."""
    first, second = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in map(model, batch))
    return (first.T @ second / len(first) - torch.eye(first.shape[1])).square().sum()


def balanced(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross-entropy of a mixture of experts, with the loss of the load."""
    scores, load = model(batch[0])
    return nn.functional.cross_entropy(scores, batch[1]) + 0.1 * load


def divergence(model: nn.Module, batch: Any, reduction: str) -> torch.Tensor:
    """Return the KL divergence."""
    return nn.functional.kl_div(model(batch[0]).log_softmax(-1), batch[1], reduction=reduction)


def root(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the root of a mean."""
    return nn.functional.mse_loss(model(batch[0]), batch[1]).sqrt()


def _of(loss: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    return lambda model, batch: loss(model, batch, **options)


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.2), nn.Linear(64, CLASSES))


LOSSES: dict[str, tuple[str, Any, Any, Any, Any]] = {
    "contrastive, CLIP": ("no", Towers, pairs, clip, None),
    "labels, ignored": ("no", language_model, tokens, of_tokens, None),
    "labels, num_loss_terms": (
        "yes", language_model, tokens, of_tokens, lambda batch: int((batch[1] != IGNORED).sum()),
    ),
    "Dice, whole batch": ("no", segmenter, masks, _of(dice, dims=(0, 1, 2, 3)), None),
    "cross-entropy": ("yes", mlp, classes, of_labels, None),
    "BatchNorm": ("no", normalised, classes, of_labels, None),
    "contrastive, SimCLR": ("no", mlp, pairs, simclr, None),
    "Dice, each sample": ("yes", segmenter, masks, _of(dice, dims=(1, 2, 3)), None),
    "focal, mean": ("yes", mlp, classes, _of(focal, by_positives=False), None),
    "focal, by positives": ("no", lambda: mlp(2), boxes, _of(focal, by_positives=True), None),
    "focal, num_loss_terms": (
        "yes", lambda: mlp(2), boxes, _of(focal, by_positives=True),
        lambda batch: int(batch[1].sum()),
    ),
    "CTC, mean": ("yes", mlp, texts, _of(ctc, reduction="mean"), None),
    "CTC, sum": ("no", mlp, texts, _of(ctc, reduction="sum"), None),
    "mixup, drawn": ("no", mlp, classes, _of(mixup, drawn=True), None),
    "mixup, neighbour": ("no", mlp, classes, _of(mixup, drawn=False), None),
    "triplet, batch-hard": ("no", mlp, classes, triplet, None),
    "VICReg": ("no", mlp, pairs, vicreg, None),
    "Barlow twins": ("no", mlp, pairs, barlow, None),
    "sum": ("no", mlp, classes, _of(of_labels, reduction="sum"), None),
    "class weights": ("no", mlp, classes, _of(of_labels, weight=WEIGHTS), None),
    "class weights, num_loss_terms": (
        "yes", mlp, classes, _of(of_labels, weight=WEIGHTS),
        lambda batch: float(WEIGHTS[batch[1]].sum()),
    ),
    "experts, load": ("no", Experts, classes, balanced, None),
    "label smoothing": ("yes", mlp, classes, _of(of_labels, label_smoothing=0.1), None),
    "KL, batchmean": ("yes", mlp, shares, _of(divergence, reduction="batchmean"), None),
    "KL, mean": ("yes", mlp, shares, _of(divergence, reduction="mean"), None),
    "KL, sum": ("no", mlp, shares, _of(divergence, reduction="sum"), None),
    "root of a mean": ("no", mlp, shares, root, None),
    "dropout": ("no", _dropping, classes, of_labels, None),
}  # fmt: skip
"""By name: whether the gradient is the same, the model, a batch, the loss, its number of terms."""


def case(name: str) -> Case:
    """Return one of `LOSSES`."""
    same, build_model, make_batch, compute_loss, num_loss_terms = LOSSES[name]
    workload = Workload(
        name=name,
        build_model=build_model,
        make_batch=make_batch,
        compute_loss=compute_loss,
        num_loss_terms=num_loss_terms,
    )
    return Case(workload=workload, same=same)


def row(name: str) -> dict[str, Any]:
    """Return what is offered of a loss, and what verify says of it."""
    one, plain = case(name), StepConfig(batch_size=BATCH)
    peak = memlab.predict(one.workload, plain, "cpu").peak_allocated_bytes or 0
    ranked = memlab.recommend(
        one.workload, int(SHARE * peak), BATCH, "cpu", exact=True, confirm=0,
        allow=["accumulation_steps"],
    )  # fmt: skip
    offered = [found.config for found in ranked if found.config.accumulation_steps > 1]
    asked = offered or [dataclasses.replace(plain, accumulation_steps=2)]
    words = [memlab.verify(one.workload, config, "cpu").same_as_full_batch for config in asked]
    return {
        "loss": name,
        "right": one.same,
        "offered": offered[0].accumulation_steps if offered else "not",
        "verify": ", ".join(dict.fromkeys(words)),
        "contradicts": sum(word == "no" for word in words) if offered else 0,
        "over-cautious": int(not offered and "yes" in words),
    }


def main() -> None:
    """Ask for each loss, and judge."""
    given, before = report.options(__file__, __doc__), report.environment()
    names = list(LOSSES)[: NUM_QUICK if given.quick else None]
    rows = [row(name) for name in names]
    report.show("recommend(exact=True), below the undivided step's peak", rows)
    contradictions = sum(one["contradicts"] for one in rows)
    judged = {
        "losses": len(rows),
        "contradictions": contradictions,
        "over-cautious": sum(one["over-cautious"] for one in rows),
        "goal": report.verdict(contradictions == 0),
    }
    report.show("against the goal of no contradiction", [judged])
    report.write(given, before, {"rows": rows, "judged": judged})


if __name__ == "__main__":
    main()
