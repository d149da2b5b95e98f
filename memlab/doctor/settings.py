"""The settings that are predicted and measured side by side: about forty, each a second or two.

Four small models of torch alone, each in three sizes and with the techniques that change what a
step holds; a small GPT-2 where transformers is installed; some of them twice, since what a device
differs from itself no prediction can tell. The models for a card are larger: a card takes the time
of its launches for those of a CPU.
"""

import dataclasses
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

from memlab.config import StepConfig
from memlab.visits.case import Case

MIXED = {"precision": "bf16-mixed"}
LIBRARY = "transformers"
Fields = dict[str, Any]

MODELS: dict[str, dict[str, tuple[Fields, tuple[int, int, int]]]] = {
    "cpu": {
        "plain-transformer": ({"sequence_length": 32}, (2, 4, 8)),
        "plain-convnet": ({"hidden_sizes": (16, 32, 64)}, (2, 4, 8)),
        "plain-mlp": ({}, (16, 32, 64)),
        "lstm-text": ({"hidden_size": 64, "sequence_length": 32}, (2, 4, 8)),
    },
    "cuda": {
        "plain-transformer": (
            {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "sequence_length": 256},
            (4, 8, 16),
        ),
        "plain-convnet": ({"image_size": 64, "hidden_sizes": (64, 128, 256)}, (16, 32, 64)),
        "plain-mlp": ({"input_size": 1024, "hidden_size": 4096}, (256, 512, 1024)),
        "lstm-text": ({"hidden_size": 512, "chunk_length": 128}, (16, 32, 64)),
    },
}
GPT: dict[str, tuple[Fields, tuple[int, int, int]]] = {
    "cpu": ({"num_layers": 2, "sequence_length": 32}, (2, 4, 8)),
    "cuda": ({}, (8, 16, 32)),
}
# what only some models have: a head over many tokens, channels, a ReLU
ONLY: dict[str, Fields] = {
    "plain-transformer": {"loss_chunks": 4},
    "plain-convnet": {"channels_last": True},
    "plain-mlp": {"inplace": True},
}
ON_A_CARD: tuple[Fields, ...] = (
    {"precision": "fp16-mixed"},
    {"precision": "tf32"},
    {"offload_activations": True},
)


def settings_for(kind: str) -> list[Case]:
    """Return the settings for a kind of device ("cpu", "cuda"), in order of value."""
    models = [_model(name, options, sizes, kind) for name, (options, sizes) in MODELS[kind].items()]
    # the first of every model before the second of any: what is cut short has a little of each
    longest = max(map(len, models))
    rounds = [[model[i] for model in models if i < len(model)] for i in range(longest)]
    again = [dataclasses.replace(case, group="again") for case in rounds[0]]
    found = [*rounds[0], *rounds[1], *again, *itertools.chain(*rounds[2:])]
    if has_transformers():
        options, sizes = GPT[kind]
        found += _model("gpt-small", options, sizes, kind)[:3]
    return found


def has_transformers() -> bool:
    """Return whether the library of the GPT-2 is installed."""
    return importlib.util.find_spec(LIBRARY) is not None


def _model(name: str, options: Fields, sizes: Sequence[int], kind: str) -> list[Case]:
    low, middle, high = [dict[str, Any](batch_size=size) for size in sizes]
    every: list[Fields] = [
        middle,
        middle | MIXED,
        high,
        middle | {"memory_budget": 0.5},
        middle | {"optimizer": "sgd"},
        high | {"accumulation_steps": 3},
    ]
    if kind == "cuda":
        every += [middle | fields for fields in ON_A_CARD]
    else:
        every += [middle | {"optimizer_in_backward": True}, low]
    if name in ONLY:
        every.append(middle | ONLY[name])
    return [Case(workload=name, options=options, config=StepConfig(**fields)) for fields in every]
