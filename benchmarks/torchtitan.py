"""How far off are predicted memory and speed of Llama 3.1 8B under FSDP2 on 8 and 128 real H100?

`benchmarks/data/torchtitan.csv` has what the authors of torchtitan read at the end of 2024: tokens
a second of each card, and GiB that the caching allocator had reserved at most. Its two rows of
plain FSDP are predicted as `StepConfig(sharding="zero3")` of the model in `titan_llama.py`, over
fake tensors and without a GPU. Goals: GiB within 10 %, tokens a second within 25 %. All other rows
are listed with what they need that memlab does not predict.

Their cards are not in memlab's table, and are taken as torchtitan describes them: H100 with 96 GB
of HBM2e at 2.4 TB/s and a power limit of 500 W, eight in a node by NVLink, and 400 Gb/s for each
card between nodes. A footnote of that page says that their peak is between those of the SXM and the
NVL form (NVIDIA's H100 datasheet: 989 and 835 TFLOP/s in bf16) and not known exactly: the middle is
taken. As its run_llama_train.sh says, the allocator has expandable segments. Gradients are clipped,
and AdamW uses the foreach kernels.

What differs: torchtitan keeps the last block whole between forward and backward (0.41 GiB of bf16);
its steps follow each other without an empty cache; its PyTorch was a nightly of December 2024.
"""

import csv
import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.titan_llama import Sizes, workload
from memlab import StepConfig
from memlab._util.units import GIB
from memlab.devices import cards
from memlab.devices.cards import Target
from memlab.prediction.predict import predict_in_process

ROWS = Path(__file__).parent / "data" / "torchtitan.csv"
GOAL_MEMORY, GOAL_SPEED = 0.10, 0.25
SAMPLES = 2  # on each card
BF16_PEAKS = (835.5e12, 989.4e12)  # of the H100 NVL and SXM; that of the cards is in between
PLAIN = "FSDP"
NEEDS = {
    "torch.compile": r"\bcompile\b",
    "float8": r"\bfloat8\b",
    "tensor parallelism": r"\b(async)?tp\b",
    "context parallelism": r"\bcp\b",
    "pipeline parallelism": r"\bpp\b",
}
OF_H200 = "compile float8"  # how the runs of llama3-8b_h200 were started, by their own text
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """Return the rows that were measured."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def is_plain(row: Row) -> bool:
    """Return whether a row is one of FSDP alone."""
    return row["Techniques"] == PLAIN


def needs(row: Row) -> list[str]:
    """Return what a row has that memlab does not predict.

    The caption of a table of FSDP alone says nothing of its rows' techniques.
    """
    told = [row["Techniques"], row["Quantization"]]
    if "1D Parallelism" not in row["caption"]:
        told.append(row["caption"])
    if "llama3-8b_h200" in row["source"]:
        told.append(OF_H200)
    text = " ".join(told).lower()
    return [what for what, pattern in NEEDS.items() if re.search(pattern, text)]


def num_cards(row: Row) -> int:
    """Return the number of cards in the caption of a row."""
    words = row["caption"].split()
    return int(words[words.index("GPUs.") - 1])


def target(ranks: int) -> Target:
    """Return the cards that torchtitan's authors used."""
    nodes = ranks // 8
    cluster = cards.cluster("8x-h100" if nodes == 1 else f"{nodes}x8-h100")
    assert cluster is not None
    card = dataclasses.replace(
        cluster.card,
        title="NVIDIA H100 96GB HBM2e",
        memory_bytes=cluster.card.memory_bytes * 96 // 80,
        memory_bytes_per_second=2.4e12,
        bf16_flops_per_second=sum(BF16_PEAKS) / 2,
        board_watts=500,
    )
    cluster = dataclasses.replace(cluster, card=card)
    return Target(kind="cuda", card=card, name=cluster.name, cluster=cluster)


def predicted(ranks: int, sizes: Sizes) -> dict[str, Any]:
    """Return what memlab predicts for one rank among so many."""
    start = time.perf_counter()
    config = StepConfig(
        batch_size=SAMPLES * ranks,
        sharding="zero3",
        world_size=ranks,
        precision="bf16-mixed",
        optimizer="adamw",
        max_grad_norm=1.0,
        expandable_segments=True,
    )
    made = predict_in_process(
        workload(sizes), config, target(ranks), seed=0, memory_limit=None, report=lambda _: None
    ).result
    assert made.outcome == "ok", made.message
    assert made.step_seconds is not None
    assert made.peak_reserved_bytes is not None
    assert made.uncertainty is not None
    return {
        "reserved GiB": made.peak_reserved_bytes / GIB,
        "tokens/s": SAMPLES * sizes.sequence / made.step_seconds,
        "stated %": 100 * made.uncertainty["step_seconds"],
        "notes": made.notes,
        "seconds": time.perf_counter() - start,
    }


def table_row(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """Return a line; errors are relative to what was measured, signed."""
    gib, speed = float(row["Memory(GiB)"]), float(row["TPS/GPU"].replace(",", ""))
    of_memory, of_speed = found["reserved GiB"] / gib - 1, found["tokens/s"] / speed - 1
    return {
        "cards": num_cards(row),
        "measured GiB": gib,
        "reserved GiB": found["reserved GiB"],
        "error %": 100 * of_memory,
        "memory": _verdict(of_memory, GOAL_MEMORY),
        "measured tokens/s": speed,
        "tokens/s": found["tokens/s"],
        "of speed %": 100 * of_speed,
        "stated %": found["stated %"],
        "speed": _verdict(of_speed, GOAL_SPEED),
        "seconds": found["seconds"],
    }


def _verdict(error: float, goal: float) -> str:
    return "met" if abs(error) <= goal else "MISSED"


def others(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows that are not predicted, with what they need."""
    return [
        {
            "run": " ".join(filter(None, (r["Techniques"], r["Parallelism"], r["Quantization"]))),
            "source": r["source"].rpartition("/")[2],
            "needs": ", ".join(needs(r)),
        }
        for r in rows
        if not is_plain(r)
    ]


def main() -> None:
    """Predict the rows of plain FSDP, and list the others."""
    given = report.options(__file__, __doc__ or "")
    before = report.environment()
    rows = read(ROWS)
    plain = [row for row in rows if is_plain(row)][: 1 if given.quick else None]
    found = [predicted(num_cards(row), Sizes()) for row in plain]
    lines = [table_row(row, each) for row, each in zip(plain, found, strict=True)]
    report.show("Llama 3.1 8B under FSDP2, predicted without a card", lines)
    for note in found[0]["notes"]:
        print(f"- {note}")
    report.show("not predicted", others(rows))
    report.write(given, before, {"rows": lines, "others": others(rows)})


if __name__ == "__main__":
    main()
