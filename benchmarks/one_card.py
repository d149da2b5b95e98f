"""How far off is the time of a step on one card, on 13 kinds of cards from 31 machines?

`benchmarks/data/one_card_ms.csv`: NVIDIA's examples as others timed them. Nothing in memlab was
fitted to these rows.

- BERT base and large on SQuAD, 384 tokens, in TF32: transformers' own model with plain attention,
  as that code had it, PyTorch's AdamW without foreach, clipped gradients.
- The same in apex's O2: weights and gradients in fp16, fp32 copies of the weights in the optimizer,
  which clips, updates and copies all tensors at once (`HalfWithCopies`). Its loss is scaled, which
  is left out here: one product, and one value that is read in an update.
- ResNet-50 on made-up images, SGD, in TF32 and in fp16 with autocast, without `channels_last`.

The optimizer of the BERT code clips and updates one tensor after the other and asks for the norm of
each, so the card waits for the host each time, which no setting of memlab does. What that takes
more for a tensor is estimated, in steps of 10 us: for each card what suits the rows of the others.
The packages are those of `gpu_peaks.py`.
"""

import csv
import functools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memlab
from benchmarks import report
from benchmarks.public_runs import options_with_packages, use_packages
from memlab import StepConfig, StepResult
from memlab.devices.cards import resolve
from memlab.prediction.predict import predict_in_process

DATA = Path(__file__).resolve().parent / "data" / "one_card_ms.csv"
TOKENS, WORDS = 384, 30522
O2 = "fp16-o2"
SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},
    "bert-large": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}  # fmt: skip
TENSORS = {"bert-base": 199, "bert-large": 391}  # that are trained
RESNET, SMALL_RESNET = "resnet-50", "resnet-18-cifar"


class HalfWithCopies(torch.optim.AdamW):
    """AdamW on fp32 copies of fp16 weights, with clipped gradients, as apex's O2 runs it."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.weights = list(parameters)
        self.copies: list[torch.Tensor] = []
        super().__init__(self.weights, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip and update the copies, and round them into the weights."""
        if not self.copies:
            self.copies = [weight.detach().float() for weight in self.weights]
        pairs = zip(self.weights, self.copies, strict=True)
        used = [(weight, copy) for weight, copy in pairs if weight.grad is not None]
        weights, copies = map(list, zip(*used, strict=True))
        gradients = [torch.empty_like(copy) for copy in copies]
        torch._foreach_copy_(gradients, [weight.grad for weight in weights])
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        nn.utils.clip_grad_norm_(copies, 1.0, foreach=True)
        (group,) = self.param_groups
        group["params"] = copies
        super().step()
        group["params"] = self.weights
        torch._foreach_copy_(weights, copies)
        for copy in copies:
            copy.grad = None


def _bert(model: str, number_format: str) -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    made = BertForQuestionAnswering(BertConfig(**SIZES[model], attn_implementation="eager"))
    return made.half() if number_format == O2 else made


def _texts(n: int) -> dict[str, torch.Tensor]:
    words = torch.randint(WORDS, (n, TOKENS))
    at = {f"{end}_positions": torch.randint(TOKENS, (n,)) for end in ("start", "end")}
    return {"input_ids": words, "attention_mask": torch.ones_like(words), **at}


def _images(n: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, pixels, pixels), torch.randint(10, (n,))


def _small_resnet() -> nn.Module:
    """Return a ResNet-18 as it is built for images of 32 x 32."""
    from torchvision import models  # of the packages

    made = models.resnet18(num_classes=10)
    made.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    made.maxpool = nn.Identity()
    return made


def workload(model: str, number_format: str) -> memlab.Workload:
    """Return the fine-tuning of a BERT that finds a span of the text, or a ResNet."""
    if model in (RESNET, SMALL_RESNET):
        from torchvision import models

        is_small = model == SMALL_RESNET
        return memlab.Workload(
            name=model, build_model=_small_resnet if is_small else models.resnet50,
            make_batch=functools.partial(_images, pixels=32 if is_small else 224),
            compute_loss=lambda made, given: nn.functional.cross_entropy(made(given[0]), given[1]),
        )  # fmt: skip
    return memlab.Workload(
        name=model, build_model=functools.partial(_bert, model, number_format),
        make_batch=_texts,
        compute_loss=lambda made, given: made(**given).loss,
    )  # fmt: skip


@functools.cache
def predicted(card: str, model: str, number_format: str, batch: int) -> StepResult:
    """Return the predicted step."""
    how: dict[str, Any] = {"optimizer": "sgd", "precision": number_format}
    if number_format == O2:
        how = {"optimizer": HalfWithCopies}
    elif model in SIZES:
        how |= {"optimizer": "adamw", "optimizer_implementation": "single-tensor",
               "max_grad_norm": 1.0}  # fmt: skip
    config = StepConfig(batch_size=batch, **how)
    found = predict_in_process(  # a worker would not have the operators of the packages
        workload(model, number_format),
        config,
        resolve(card),
        seed=0,
        memory_limit=None,
        report=lambda _: None,
    )
    return memlab.require_ok(found.result)


def lines(quick: bool) -> list[dict[str, Any]]:
    """Return a line for each row of the data."""
    with DATA.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows[:: 16 if quick else 1]:
        made = predicted(row["card"], row["model"], row["format"], int(row["batch"]))
        assert made.step_seconds is not None
        found.append({
            "card": row["card"], "model": row["model"], "format": row["format"],
            "batch": int(row["batch"]), "system": row["system"], "ms": float(row["step_ms"]),
            "predicted ms": 1e3 * made.step_seconds,
            "off %": 1e5 * made.step_seconds / float(row["step_ms"]) - 100,
            "stated %": 100 * (made.uncertainty or {})["step_seconds"],
            "source": row["source"].partition(":")[0],
        })  # fmt: skip
    return found


def with_host(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with what the optimizer waits for its host, by the rows of other cards."""

    def off(line: dict[str, Any], each: float) -> float:
        return float((line["predicted ms"] + each * TENSORS[line["model"]]) / line["ms"] - 1)

    found = []
    for line in given:
        others = [other for other in given if other["card"] != line["card"]]
        each = min(
            (step / 100 for step in range(61)),
            key=lambda ms: statistics.median(abs(off(other, ms)) for other in others),
        )
        found.append({**line, "ms a tensor": each, "off %": 100 * off(line, each)})
    return found


def by_card(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors of each card, and of all."""
    groups = {card: [each for each in given if each["card"] == card]
              for card in dict.fromkeys(each["card"] for each in given)}  # fmt: skip
    found = []
    for name, own in [*groups.items(), ("all", given)]:
        off = [each["off %"] for each in own]
        found.append({
            "card": name, "rows": len(own), "median off %": statistics.median(off),
            "median |off| %": statistics.median(map(abs, off)),
            "9 of 10 within %": float(np.quantile(np.abs(off), 0.9)),
            "within what is stated %": 100 * statistics.mean(
                abs(1 / (1 + each["off %"] / 100) - 1) <= each["stated %"] / 100 for each in own
            ),
        })  # fmt: skip
    return found


def main() -> None:
    """Print the steps and the errors of each card."""
    given, before = options_with_packages(__file__, __doc__ or ""), report.environment()
    use_packages(given.packages)
    found = lines(given.quick)
    report.show("steps on one card", [
        {name: value for name, value in each.items() if name != "source"} for each in found
    ])  # fmt: skip
    berts = [each for each in found if each["model"] != RESNET and each["format"] != O2]
    waited = with_host(berts)
    tables = {
        "BERT": berts, "BERT, with what its optimizer waits, by the other cards": waited,
        "BERT in fp16 with fp32 copies (O2)": [each for each in found if each["format"] == O2],
        **{f"{RESNET} in {number_format}": [
            each for each in found if (each["model"], each["format"]) == (RESNET, number_format)
        ] for number_format in ("tf32", "fp16-mixed")},
    }  # fmt: skip
    cards = {name: by_card(own) for name, own in tables.items() if own}
    for name, table in cards.items():
        report.show(name, table)
    print("ms a tensor:", sorted({each["ms a tensor"] for each in waited}))
    report.write(report.Options(quick=given.quick, out=given.out), before, {
        "steps": found, "cards": cards,
    })  # fmt: skip


if __name__ == "__main__":
    main()
