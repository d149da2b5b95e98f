"""Does a prediction ever crash its worker, and does the worker grow?

Predictions follow one another as a person makes them: through `memlab.predict`, in its worker, over
small models in an order drawn by a seeded generator, with other batches, precisions and optimizers,
for this CPU and for cards. A third of the models are those of `models.py`; some of the others do
what has once ended a process: copied modules, frozen weights, gradients that are sparse, errors in
backward.
Goal: no crash in 2,000 predictions over 40 models. What is not ok is listed with its sentence.

Memory is what the worker, the largest process, holds resident after its answer. It grows while
models are seen for the first time (libraries are imported, operators learned), so that growth is
told from halfway on. Workers are replaced where one model leaves something behind, so that each row
has the processes by their ids.
"""

import contextlib
import copy
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import memlab
from benchmarks import models, report
from memlab import StepConfig, StepResult, Workload
from memlab._util.units import MIB

NUM_PREDICTIONS, NUM_QUICK = 2_000, 60
DEVICES = ("cpu", "cpu", "h200", "rtx-4060", "rtx-3060")
PRECISIONS = ("fp32", "fp32", "bf16-mixed", "fp16-mixed")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
LARGE = ("densenet121", "vnet", "unet-3d")  # seconds each
WIDTH, LENGTH, TOKENS = 16, 12, 50


class Residual(nn.Module):
    """Adds what a module makes of its input to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what is made of it, of any shape."""
        return x + self.inner(x)


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank update beside it, as LoRA has them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear).requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, (..., out_features)."""
        outputs: torch.Tensor = self.linear(x) + self.up(self.down(x)) * self.scale
        return outputs


class ConvAttention(nn.Module):
    """Attention along the length with convolutions for its projections, (n, width, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many channels, (n, width, length)."""
        query, key, value = self.qkv(x).chunk(3, dim=1)
        scores = torch.softmax(query.transpose(1, 2) @ key, dim=-1)
        return (scores @ value.transpose(1, 2)).transpose(1, 2)


class FailsInBackward(nn.Module):
    """Raises while its gradient is taken, which has to be told and no more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        if x.requires_grad:
            x.register_hook(_fail)
        return x


class Recurrent(nn.Module):
    """A recurrent layer whose last outputs are taken, (n, length, width) -> (n, width)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs at the last time, (n, width)."""
        outputs: torch.Tensor = self.layer(x)[0][:, -1]
        return outputs


def _fail(_: torch.Tensor) -> None:
    raise ValueError("this gradient is refused on purpose")


def _mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 3))


def _low_rank() -> nn.Module:
    blocks = [Residual(LowRank(nn.Linear(WIDTH, WIDTH))) for _ in range(3)]
    return nn.Sequential(*blocks, copy.deepcopy(nn.Linear(WIDTH, 3)))


def _copied_blocks() -> nn.Module:
    block = Residual(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(4)), nn.Linear(WIDTH, 3))


def _convolutions() -> nn.Module:
    layers = [nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    body = [Residual(nn.Sequential(*layers)), Residual(ConvAttention())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(WIDTH, 3))


def _encoder(**settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, **settings)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(LENGTH * WIDTH, 3))


VECTORS: dict[str, Callable[[], nn.Module]] = {
    "low rank": _low_rank,
    "copied blocks": _copied_blocks,
    "dropout": lambda: _mlp(nn.Dropout(), nn.ELU()),
    "batch norm": lambda: _mlp(nn.BatchNorm1d(WIDTH), nn.SiLU()),
    "rms norm": lambda: _mlp(nn.RMSNorm(WIDTH), nn.Mish()),
    "weight norm": lambda: _mlp(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral norm": lambda: _mlp(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "fails in backward": lambda: _mlp(FailsInBackward()),
    "layer norm": lambda: _mlp(nn.LayerNorm(WIDTH), nn.Tanh()),
    "gated": lambda: _mlp(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "alpha dropout": lambda: _mlp(nn.AlphaDropout(), nn.SELU()),
    "leaky": lambda: _mlp(nn.LeakyReLU(), nn.Linear(WIDTH, WIDTH), nn.Hardswish()),
    "frozen": lambda: _mlp(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.CELU()),
    "shared": lambda: _mlp(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())] * 3),
    "double": lambda: _mlp(Residual(Residual(nn.Linear(WIDTH, WIDTH))), nn.Softplus()),
    "softmax": lambda: _mlp(nn.Softmax(dim=-1), nn.PReLU()),
    "in place": lambda: _mlp(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
}
SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "attention": _encoder,
    "attention, norm first": lambda: _encoder(norm_first=True, activation="gelu"),
    "lstm": lambda: nn.Sequential(Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), _mlp()),
    "rnn": lambda: nn.Sequential(Recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True)), _mlp()),
}
CHANNELS: dict[str, Callable[[], nn.Module]] = {"convolution and attention": _convolutions}
INDICES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Flatten(), _flat_head()),
    "sparse embedding": lambda: nn.Sequential(
        nn.Embedding(TOKENS, WIDTH, sparse=True), nn.Flatten(), _flat_head()
    ),
    "bag": lambda: nn.Sequential(nn.EmbeddingBag(TOKENS, WIDTH), _mlp()),
    "sparse bag": lambda: nn.Sequential(nn.EmbeddingBag(TOKENS, WIDTH, sparse=True), _mlp()),
}


def _flat_head() -> nn.Module:
    return nn.Linear(LENGTH * WIDTH, 3)


def workloads() -> list[Workload]:
    """Return what is predicted: small models of libraries, and layers of PyTorch."""
    found = [make() for name, make in models.WORKLOADS.items() if name not in LARGE]
    shapes = ((VECTORS, (WIDTH,)), (SEQUENCES, (LENGTH, WIDTH)), (CHANNELS, (WIDTH, LENGTH)))
    for table, shape in shapes:
        found += [_classified(name, build, shape) for name, build in table.items()]
    return found + [_classified(name, build, None) for name, build in INDICES.items()]


def _classified(
    name: str, build: Callable[[], nn.Module], shape: tuple[int, ...] | None
) -> Workload:
    def make_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randint(TOKENS, (n, LENGTH)) if shape is None else torch.randn(n, *shape)
        return inputs, torch.randint(3, (n,))

    return Workload(
        name=name,
        build_model=build,
        make_batch=make_batch,
        compute_loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    )


def setting(generator: random.Random, device: str) -> StepConfig:
    """Return how a step is run, drawn at random."""
    # fp16 is another order of magnitude slower on a CPU, where operators are timed
    formats = [p for p in PRECISIONS if device != "cpu" or p != "fp16-mixed"]
    return StepConfig(
        batch_size=generator.randint(2, 9),
        accumulation_steps=generator.choice((1, 1, 2)),
        precision=generator.choice(formats),
        optimizer=generator.choice(OPTIMIZERS),
    )


def soak(count: int) -> list[dict[str, Any]]:
    """Return a row for each prediction, with what the worker and its helpers held after it."""
    generator = random.Random(0)
    tried, rows = workloads(), list[dict[str, Any]]()
    for number in range(count):
        device = generator.choice(DEVICES)
        workload = tried[number] if number < len(tried) else generator.choice(tried)
        config = setting(generator, device)
        start = time.perf_counter()
        result = memlab.predict(workload, config, device)
        rows.append(_row(workload, config, device, result, time.perf_counter() - start))
        rows[-1]["processes"] = _held_bytes()
        if result.outcome == "crashed" or number % 20 == 19:
            print(
                f"{number + 1} of {count}: {result.outcome}, {_largest(rows[-1]) / MIB:.0f} MiB",
                flush=True,
            )
    return rows


def _row(
    workload: Workload, config: StepConfig, device: str, result: StepResult, seconds: float
) -> dict[str, Any]:
    return {
        "model": workload.name,
        "device": device,
        "config": str(config),
        "outcome": str(result.outcome),
        "seconds": seconds,
        "message": result.message,
    }


def _held_bytes() -> dict[int, int]:
    """Return by process id what the processes below this one hold resident."""
    found = dict[int, int]()
    for child in psutil.Process().children(recursive=True):  # a worker is a child of its keeper
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = child.memory_info().rss
    return found


def _largest(row: dict[str, Any]) -> int:
    """Return what the largest of the processes held: the worker that predicted."""
    return max(row["processes"].values(), default=0)


def _num_processes(rows: list[dict[str, Any]]) -> int:
    """Return how many processes there were in all."""
    return len({pid for row in rows for pid in row["processes"]})


def summary(rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return how the predictions for a device ended, as a row of a table."""
    mine = [row for row in rows if row["device"] == device]
    outcomes = Counter(row["outcome"] for row in mine)
    return {
        "device": device,
        "predictions": len(mine),
        "ok": outcomes["ok"],
        "unsupported": outcomes["unsupported"],
        "failed": outcomes["failed"],
        "crashed": outcomes["crashed"],
        "others": len(mine) - sum(outcomes[o] for o in ("ok", "unsupported", "failed", "crashed")),
        "median s": statistics.median(row["seconds"] for row in mine) if mine else 0.0,
    }


def main() -> None:
    """Predict, and tell what ended how."""
    given, before = report.options(__file__, __doc__), report.environment()
    start = time.perf_counter()
    rows = soak(NUM_QUICK if given.quick else NUM_PREDICTIONS)
    seconds = time.perf_counter() - start

    report.show("predictions", [summary(rows, device) for device in dict.fromkeys(DEVICES)])
    unfinished = Counter(
        (row["model"], row["outcome"], row["message"][:90])
        for row in rows
        if row["outcome"] != "ok"
    )
    if unfinished:
        names = ("model", "outcome", "message")
        report.show(
            "not ok",
            [{**dict(zip(names, k, strict=True)), "times": n} for k, n in unfinished.items()],
        )
    held = [_largest(row) for row in rows]
    growth = held[-1] - held[len(held) // 2]
    crashes = sum(row["outcome"] == "crashed" for row in rows)
    print(
        f"\n{len(rows)} predictions over {len({row['model'] for row in rows})} models in "
        f"{seconds:.0f} s: {crashes} crashes ({report.verdict(not crashes)}); the worker grew by "
        f"{growth / MIB:.1f} MiB from halfway on; {_num_processes(rows)} processes in all"
    )
    results = {"rows": rows, "held_bytes": held, "seconds": seconds, "crashes": crashes}
    report.write(given, before, results)


if __name__ == "__main__":
    main()
