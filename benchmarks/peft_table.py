"""peft's table of methods on one L40S: its rows, and what is predicted of them.

`benchmarks/data/finetune_l40s.csv` has what 63 runs reserved, as the authors of peft publish it
with their comparison of methods: Llama 3.2 3B in bf16 on MetaMathQA, four samples a step, AdamW,
gradients clipped, torch 2.13. Each row holds the config of its adapter, and peft builds it here.

The recipe is that of `method_comparison/MetaMathQA/run.py`. A batch is padded to its longest
sample, so that attention gets a mask. The output of the model is held until the next forward, and
with it the logits and the keys and values of a cache. The cache of the allocator is emptied every
ten steps, and batches come sorted from long to short in groups of twenty, so that the longest of a
group meets an empty cache.

What the rows do not say is how long the samples are. All runs have the same, in the same order. So
two lengths are found by the row `LENGTHS_BY`, by bisection (`length_of`): of the most that is
reserved, and of the 99th percentile over all steps. The other rows are held against predictions at
these two lengths, which makes it a comparison of methods: what an adapter changes, not what the
base takes.

The most that is reserved counts the evaluations, too, which generate with a cache of 50 samples;
the 99th percentile is of training alone. How blocks lie in the segments depends on the batches
before, which are not known: all are predicted as long as the one that is asked for.

Left out are rows with an optimizer of peft's own, those that repeat another's config at another
learning rate, and `BUILT_SLOWLY`.
"""

import bisect
import csv
import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import report
from memlab import StepConfig, StepResult, Workload, workloads
from memlab.devices import cards
from memlab.prediction.predict import predict_in_process

ROWS = Path(__file__).parent / "data" / "finetune_l40s.csv"
CARD, SAMPLES, GB = "l40s", 4, 1e9
LENGTHS_BY = "lora/llama-3.2-3B-rank32"
COLUMNS = {"max": "reserved_max_bytes", "99th": "reserved_99th_bytes"}
MOST_TOKENS = 2048  # none of MetaMathQA is as long
BUILT_SLOWLY = ("adamss", "boft", "osf", "psoft/llama-3.2-3B-default")  # from values, for minutes
SHORTER = 8  # tokens that each sample is shorter than the one before
IGNORED = -100  # the label of padding
GOAL_MEDIAN, GOAL_P95 = 0.05, 0.12
QUICK = 3
Row = dict[str, str]


def read(path: Path = ROWS) -> list[Row]:
    """Return the rows that are compared."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["optimizer"] == "AdamW"]
    different = {row["peft_config"]: row for row in reversed(rows)}
    kept = [row for row in rows if different[row["peft_config"]] is row]
    return [row for row in kept if not row["experiment"].startswith(BUILT_SLOWLY)]


def build(row: Row) -> nn.Module:
    """Return the model of a row, as its script builds it.

    Raises:
        ValueError: the peft of this environment trains other parameters than that of the row.
    """
    import peft  # an extra
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    base: Any = workloads.finetune("llama-3b", adapter="none").build_model()
    base.config.use_cache = True
    if not row["peft_config"]:
        return base  # type: ignore[no-any-return]
    given = json.loads(row["peft_config"])
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[given.pop("peft_type")]
    known = {field.name for field in dataclasses.fields(kind)}
    config = kind(
        task_type="CAUSAL_LM", **{name: value for name, value in given.items() if name in known}
    )
    is_cast = row["autocast_adapter_dtype"] == "True"
    made: nn.Module = peft.get_peft_model(base, config, autocast_adapter_dtype=is_cast)
    trained = sum(p.numel() for p in made.parameters() if p.requires_grad)
    if trained != int(row["trained_parameters"]):
        raise ValueError(
            f"peft {peft.__version__} trains {trained:,} parameters, the row's peft trained "
            f"{int(row['trained_parameters']):,}"
        )
    return made


def make_batch(num_tokens: int, num_samples: int) -> dict[str, torch.Tensor]:
    """Return samples that are padded to the first one's length."""
    tokens = torch.randint(1000, (num_samples, num_tokens))
    lengths = num_tokens - SHORTER * torch.arange(num_samples)
    mask = (torch.arange(num_tokens) < lengths[:, None]).long()
    labels = tokens.masked_fill(mask == 0, IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss, which holds the rest of the output, as the script's loop does."""
    output = model(**batch, num_items_in_batch=batch["attention_mask"].numel())
    loss: torch.Tensor = output.loss
    loss.held = output.logits, output.past_key_values  # type: ignore[attr-defined]
    return loss


def predicted(row: Row, num_tokens: int) -> StepResult:
    """Return what memlab predicts of a step with batches of this length."""
    workload = Workload(
        name=row["experiment"],
        build_model=functools.partial(build, row),
        make_batch=functools.partial(make_batch, num_tokens),
        compute_loss=loss_of,
    )
    return predict_in_process(
        workload, StepConfig(batch_size=SAMPLES, max_grad_norm=1.0), cards.resolve(CARD),
        seed=0, memory_limit=None, report=lambda _: None,
    ).result  # fmt: skip


@functools.cache
def length_of(column: str) -> int:
    """Return the tokens at which `LENGTHS_BY` is predicted nearest to what it reserved.

    Bisection finds the length from which as much or more is reserved; that or the one below it.
    """
    (row,) = [row for row in read() if row["experiment"] == LENGTHS_BY]
    measured = int(row[column])

    @functools.cache
    def reserved(num_tokens: int) -> int:
        found = predicted(row, num_tokens).peak_reserved_bytes
        assert found is not None
        return found

    enough = bisect.bisect_left(range(1, MOST_TOKENS), measured, key=reserved) + 1
    return min(enough - 1, enough, key=lambda tokens: abs(reserved(tokens) - measured))


def lines(quick: bool) -> Iterator[dict[str, Any]]:
    """Return each row beside its predictions, one by one."""
    for row in read()[: QUICK if quick else None]:
        yield line_of(row)


def line_of(row: Row) -> dict[str, Any]:
    """Return a line; errors are relative to what was measured, signed."""
    start, line = time.perf_counter(), {"experiment": row["experiment"]}
    for name, column in COLUMNS.items():
        made = predicted(row, length_of(column))
        if made.outcome != "ok" or made.peak_reserved_bytes is None:
            return {**line, "why": made.message}
        measured = int(row[column])
        line[f"{name}: tokens"] = length_of(column)
        line[f"{name}: measured GB"] = measured / GB
        line[f"{name}: predicted GB"] = made.peak_reserved_bytes / GB
        line[f"{name}: error %"] = 100 * (made.peak_reserved_bytes / measured - 1)
    return {**line, "s": time.perf_counter() - start}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how far off the lines are, without the one that the lengths were found by."""
    known = [line for line in lines if "why" not in line and line["experiment"] != LENGTHS_BY]
    found: dict[str, Any] = {"rows": len(known)}
    for name in COLUMNS:
        errors = [abs(line[f"{name}: error %"]) for line in known]
        found[f"{name}: median %"] = float(np.median(errors))
        found[f"{name}: p95 %"] = float(np.quantile(errors, 0.95))
        found[f"{name}: most %"] = max(errors)
    return {**found, "without an answer": sum("why" in line for line in lines)}


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the lines, and whether the goals are met."""
    answered = [line for line in lines if "why" not in line]
    report.show("peft's table on one L40S, reserved bytes predicted without a card", answered)
    for line in lines:
        if "why" in line:
            print(f"{line['experiment']}: {line['why']}")
    found = summary(lines)
    report.show(f"absolute errors of reserved bytes, without {LENGTHS_BY}", [found])
    is_met = all(
        found[f"{name}: median %"] <= 100 * GOAL_MEDIAN
        and found[f"{name}: p95 %"] <= 100 * GOAL_P95
        for name in COLUMNS
    )
    print(f"median {GOAL_MEDIAN:.0%}, 95th percentile {GOAL_P95:.0%}: {report.verdict(is_met)}")
