"""What others measured on real cards, each row with what is told of the run and what is not known.

A row has two sides. `setting` is all that a tool gets, as JSON; `truth` is what was measured, and
stays here. Every row comes from a file of `benchmarks/data`, whose README names the authors.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    gpu_peaks,
    iteration_times,
    kernel_peaks,
    litgpt_hub,
    litgpt_model,
    litgpt_table,
    peft_table,
    torchtitan,
)
from benchmarks.public_runs import IMAGE_SIZE, LENGTH
from memlab._util.units import GIB, MIB
from memlab.devices import cards

MODELS = Path(__file__).parent / "models.json"
LENGTH_OF_PEFT = 704  # `peft_table.length_of("reserved_max_bytes")`: memlab found it by one row
ALLOCATED, RESERVED, DEVICE = "allocated", "reserved", "device"
ALLOWED = {
    "reads": (ALLOCATED, RESERVED, DEVICE, "seconds"),
    "precision": ("fp32", "bf16", "bf16-mixed", "fp16", None),
    "optimizer": ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD", "Adafactor", None),
    "base": ("fp32", "bf16", "nf4", "nf4-dq", None),
    "attention": ("sdpa", "sdpa with a mask", "eager"),
}
LITGPT_NAMES = {
    "phi-1.5": "microsoft/phi-1_5",
    "StableLM Alpha": "stabilityai/stablelm-base-alpha-3b",
    "Llama 2 7 B": "meta-llama/Llama-2-7b-hf",
    "Llama 2 13 B": "meta-llama/Llama-2-13b-hf",
    "Falcon": "tiiuae/falcon-40b",
}
HUB_NAMES = {
    "falcon-7b": "tiiuae/falcon-7b", "gemma-2b": "google/gemma-2b", "gemma-7b": "google/gemma-7b",
    "gemma-2-9b": "google/gemma-2-9b", "Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "Meta-Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Meta-Llama-3.1-8B": "meta-llama/Meta-Llama-3-8B",
    "Mistral-7B-v0.1": "mistralai/Mistral-7B-v0.1", "Mistral-7B-v0.2": "mistralai/Mistral-7B-v0.1",
    "phi-2": "microsoft/phi-2", "Phi-3-mini-4k-instruct": "microsoft/Phi-3-mini-4k-instruct",
    "stablelm-base-alpha-3b": "stabilityai/stablelm-base-alpha-3b",
    "TinyLlama-1.1B-intermediate-step-1431k-3T":
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
}  # fmt: skip
"""Models of the same sizes on the hub; some pairs differ in data and not in sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """What was measured.

    Attributes:
        bytes: the peak; None where the run ended out of memory, or only its time is known.
        seconds: of an update; None where it was not measured.
        fits: whether the run trained on its card.
        guessed: what of its setting the source does not say, and what was taken.
        source: of the row.
        published: bytes that other tools' authors published for this row, by tool.
    """

    source: str
    bytes: int | None = None
    seconds: float | None = None
    fits: bool = True
    guessed: tuple[str, ...] = ()
    published: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A run that was measured.

    Attributes:
        setting: as a tool gets it, plain JSON: `table` and `number`; `reads`, the kind of bytes
            that was read ("allocated", "reserved", "device") or "seconds"; `card`, its title and
            bytes; `cards`; `model` (see `described`); `method`, `base`, `precision`, `optimizer`,
            `batch` (samples of a card and micro-batch), `accumulation`, `sequence` or `image`,
            `checkpointing`, `attention`; and `recipe`, the row of the file without what was
            measured.
        truth: what was measured.
    """

    setting: dict[str, Any]
    truth: Truth

    @property
    def is_known(self) -> bool:
        """Whether the source says all of the setting."""
        return not self.truth.guessed


def every(tables: tuple[str, ...] = ()) -> list[Row]:
    """Return the rows of these tables, or of all."""
    return [row for name in tables or TABLES for row in TABLES[name]()]


def contradiction(row: Row) -> str:
    """Return what in a row cannot be true at once, as a sentence; "" if all of it can."""
    told, place = row.setting, f"row {row.setting['number']} of {row.setting['table']}"
    for name, allowed in ALLOWED.items():
        if told[name] not in allowed:
            names = ", ".join(map(str, allowed))
            return f"{place}: {name}={told[name]!r}; allowed is one of {names}"
    if told["batch"] is not None and told["batch"] < 1:
        return f"{place}: batch={told['batch']}, and a step has one sample at least"
    if told["sequence"] and told["image"]:
        return f"{place}: sequence={told['sequence']} and image={told['image']}; give one of them"
    if told["method"]["kind"] == "full" and str(told["base"]).startswith("nf4"):
        return f"{place}: base={told['base']!r}, which is frozen, is trained in full"
    ranks = told.get("tensor", 1) * told.get("data", told["cards"])
    if ranks != told["cards"]:
        return f"{place}: cards={told['cards']}, and {ranks} ranks are told"
    if (row.truth.bytes or 0) > told["card"]["bytes"]:
        return f"{place}: a peak of {row.truth.bytes} bytes on {told['card']['title']}"
    return ""


def described(name: str) -> dict[str, Any]:
    """Return what tools ask of a model.

    Its `name`, its `config` as on the hub, the number of its `parameters`,
    `largest_layer_parameters`, and its `shape`.
    """
    return {"name": name, **json.loads(_described(name))}


@functools.cache
def _described(name: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM, T5ForConditionalGeneration

    given = json.loads(MODELS.read_text())["models"][name]
    config: Any = AutoConfig.for_model(**given)
    with torch.device("meta"):
        make = T5ForConditionalGeneration if given["model_type"] == "t5" else None
        model = make(config) if make else AutoModelForCausalLM.from_config(config)
    return json.dumps({"config": given, **_counted(model), "shape": _shape(config)})


def _counted(model: torch.nn.Module) -> dict[str, int]:
    """Return the number of parameters, and of those of the module that has most itself."""
    own = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    total = sum(p.numel() for p in model.parameters())
    return {"parameters": total, "largest_layer_parameters": max(own)}


def _shape(config: Any) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    known = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
    inner = next((n for key in known if (n := getattr(config, key, None))), 4 * hidden)
    groups = next((n for key in ("num_key_value_heads", "num_kv_heads")
                   if (n := getattr(config, key, None))), heads)  # fmt: skip
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        groups = 1
    return {
        "family": config.model_type, "layers": config.num_hidden_layers, "hidden": hidden,
        "heads": heads, "kv_heads": groups, "intermediate": inner, "vocab": config.vocab_size,
        "tied": bool(getattr(config, "tie_word_embeddings", True)),
        "gated": config.model_type in ("llama", "mistral", "qwen3", "gemma", "gemma2", "phi3"),
    }  # fmt: skip


@functools.cache
def _of_torchvision(name: str) -> str:
    from benchmarks.public_runs import convnets

    return json.dumps(_counted(convnets()[name.lower()]()))


def _setting(table: str, number: int, card: cards.Card, **told: Any) -> dict[str, Any]:
    usual = {
        "cards": 1, "method": {"kind": "full"}, "base": None, "accumulation": 1,
        "checkpointing": False, "attention": "sdpa", "sequence": None, "image": None,
    }  # fmt: skip
    of_card = {"name": card.name, "title": card.title, "bytes": card.memory_bytes}
    return {"table": table, "number": number, "card": of_card, **usual, **told}


def _without(row: Mapping[str, str], *measured: str) -> dict[str, str]:
    return {name: value for name, value in row.items() if name not in measured}


def _card(text: str) -> cards.Card:
    card = cards.find(text)
    assert card is not None, text
    return card


def _gpu_peaks() -> Iterator[Row]:
    measured = ("ground_bytes", "min_cap_trained", "max_cap_oom", "near_capacity",
                *gpu_peaks.PEERS.values(), "xmem_runtime_ns")  # fmt: skip
    for number, row in enumerate(gpu_peaks.read(gpu_peaks.PEAKS, quick=False)):
        name, is_image = row["model"], row["family"] == "cnn"
        model = (
            {"name": name, "torchvision": name, **json.loads(_of_torchvision(name))}
            if is_image
            else described(name)
        )
        is_eager = name in ("T5-small", "EleutherAI/gpt-neo-125M")
        yield Row(
            setting=_setting(
                "gpu_peaks", number, _card(row["gpu"]), reads=DEVICE, model=model,
                precision="fp32", base="fp32", optimizer=row["optimizer"],
                batch=int(row["batch_size"]), sequence=None if is_image else LENGTH,
                image=IMAGE_SIZE if is_image else None,
                attention="eager" if is_eager else "sdpa", recipe=_without(row, *measured),
            ),
            truth=Truth(
                source=f"github:Stone-ResearchLife/xMem@{row['commit'][:12]}:{row['path']}",
                bytes=int(row["ground_bytes"]),
                published={name: int(row[column]) for name, column in gpu_peaks.PEERS.items()
                           if row[column]},
                guessed=("what a card held at the sampler's first reading",) if is_image else (),
            ),
        )  # fmt: skip


def _litgpt_table() -> Iterator[Row]:
    for number, row in enumerate(litgpt_table.read()):
        recipe, failed = litgpt_table.recipe_of(row), row["Max GPU RAM"] == "OOM"
        size = f"{row['Model']} {row['Size']}" if row["Model"] == "Llama 2" else row["Model"]
        method: dict[str, Any] = {
            "kind": recipe.adapter,
            "parameters": litgpt_table.num_trained(row),
        }
        if recipe.adapter == "lora":
            method |= {"rank": litgpt_model.RANK, "targets": ["q", "v"]}
        yield Row(
            setting=_setting(
                "litgpt_table", number, _card(litgpt_table.CARD), reads=ALLOCATED,
                model=described(LITGPT_NAMES[size]), method=method, base=recipe.quantized or "bf16",
                precision="bf16", optimizer="AdamW", batch=int(row["Microbatch size"]),
                sequence=recipe.sizes.longest,
                recipe=_without(row, "Max GPU RAM", "Time 1k iterations"),
            ),
            truth=Truth(
                source=row["source"], fits=not failed,
                bytes=None if failed else _decimal(row["Max GPU RAM"]),
            ),
        )  # fmt: skip


def _decimal(text: str) -> int:
    return round(float(text.removesuffix(" GB")) * litgpt_table.GB)


def _litgpt_hub() -> Iterator[Row]:
    for number, row in enumerate(litgpt_hub.read()):
        told, failed = json.loads(row["lora"]), row["peak_gb"] == litgpt_hub.OUT_OF_MEMORY
        parts = {"lora_query": "q", "lora_key": "k", "lora_value": "v", "lora_projection": "o",
                 "lora_mlp": "mlp", "lora_head": "head"}  # fmt: skip
        quantized = litgpt_hub.is_quantized(row)
        yield Row(
            setting=_setting(
                "litgpt_hub", number, _card(litgpt_hub.CARD), reads=ALLOCATED,
                model=described(HUB_NAMES[row["checkpoint"]]), base="nf4" if quantized else "bf16",
                method={"kind": "lora", "rank": told["lora_r"],
                        "targets": [part for name, part in parts.items() if told.get(name)]},
                precision="bf16", optimizer="AdamW", batch=int(row["micro_batch_size"]),
                sequence=int(row["max_seq_length"]), recipe=_without(row, "peak_gb"),
            ),
            truth=Truth(
                source=row["source"], fits=not failed,
                bytes=None if failed else _decimal(row["peak_gb"]),
                guessed=("the length of the samples before the longest",) if quantized else (),
            ),
        )  # fmt: skip


def _peft_table() -> Iterator[Row]:
    for number, row in enumerate(peft_table.read()):
        config = json.loads(row["peft_config"]) if row["peft_config"] else {}
        kind = str(config.get("peft_type", "full")).lower()
        method: dict[str, Any] = {"kind": kind, "parameters": int(row["trained_parameters"])}
        if kind == "lora":
            names = [name.removesuffix("_proj") for name in config["target_modules"] or ("q", "v")]
            parts = {"mlp" if name in ("gate", "up", "down") else name for name in names}
            method |= {"rank": config["r"], "targets": sorted(parts)}
        yield Row(
            setting=_setting(
                "peft_table", number, _card(peft_table.CARD), reads=RESERVED,
                model=described("meta-llama/Llama-3.2-3B-Instruct"), method=method, base="bf16",
                precision="bf16", optimizer="AdamW", batch=peft_table.SAMPLES,
                sequence=LENGTH_OF_PEFT, attention="sdpa with a mask",
                recipe=_without(row, *peft_table.COLUMNS.values()),
            ),
            truth=Truth(
                source=row["source"], bytes=int(row["reserved_max_bytes"]),
                guessed=("the tokens of the longest batch, found by one row",),
            ),
        )  # fmt: skip


def _torchtitan() -> Iterator[Row]:
    for number, row in enumerate(torchtitan.read(torchtitan.ROWS)):
        if not torchtitan.is_plain(row):
            continue
        ranks, speed = torchtitan.num_cards(row), float(row["TPS/GPU"].replace(",", ""))
        yield Row(
            setting=_setting(
                "torchtitan", number, _of_torchtitan(ranks), reads=RESERVED, cards=ranks,
                sharding="zero3",
                model=described("meta-llama/Meta-Llama-3-8B"), precision="bf16-mixed",
                optimizer="AdamW", batch=torchtitan.SAMPLES, sequence=8192,
                checkpointing="selective", recipe=_without(row, "TPS/GPU", "Memory(GiB)"),
            ),
            truth=Truth(
                source=row["source"], bytes=round(float(row["Memory(GiB)"]) * GIB),
                seconds=torchtitan.SAMPLES * 8192 / speed,
                guessed=("the peak of these cards, between two forms of an H100",
                         "what of their 96 GB CUDA can give"),
            ),
        )  # fmt: skip


def _of_torchtitan(ranks: int) -> cards.Card:
    card = torchtitan.target(ranks).card
    assert card is not None
    return card


def _kernel_peaks() -> Iterator[Row]:
    number = 0
    for sweep in kernel_peaks.read(kernel_peaks.PEAKS, quick=False):
        for row in sweep:
            yield Row(
                setting=_setting(
                    "kernel_peaks", number, _card(row["gpu"]), reads=ALLOCATED, model=None,
                    precision=None, optimizer=None, batch=None,
                    recipe=_without(row, "peak_allocated_mib"),
                ),
                truth=Truth(
                    source=row["source"], bytes=round(float(row["peak_allocated_mib"]) * MIB),
                    guessed=("what else the measuring process held",),
                ),
            )  # fmt: skip
            number += 1


def _iteration_times() -> Iterator[Row]:
    for number, row in enumerate(iteration_times.read()):
        if not iteration_times.is_judged(row):
            continue
        case = iteration_times.case_of(row)
        shape = {
            "family": "gpt2", "layers": int(row["# layers"]), "hidden": case.hidden,
            "heads": case.heads, "kv_heads": case.heads, "intermediate": 4 * case.hidden,
            "vocab": 50257, "tied": True, "gated": False,
        }  # fmt: skip
        count = 12 * shape["layers"] * case.hidden**2 + (50257 + case.sequence) * case.hidden
        yield Row(
            setting=_setting(
                "iteration_times", number, _card(iteration_times.CARD), reads="seconds",
                cards=case.data * case.tensor, tensor=case.tensor, data=case.data,
                model={"name": f"GPT {case.hidden} x {row['# layers']}", "config": None,
                       "parameters": count, "shape": shape},
                precision="fp16", optimizer="AdamW", batch=case.micro_batch,
                accumulation=case.accumulation, sequence=case.sequence, checkpointing="blocks",
                attention="eager", recipe=_without(row, "iteration time (ms)"),
            ),
            truth=Truth(
                source=row["source"], seconds=float(row["iteration time (ms)"]) / 1e3,
                guessed=("which A100", "what the host takes from kernel to kernel"),
            ),
        )  # fmt: skip


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "gpu_peaks": _gpu_peaks,
    "litgpt_table": _litgpt_table,
    "litgpt_hub": _litgpt_hub,
    "peft_table": _peft_table,
    "torchtitan": _torchtitan,
    "kernel_peaks": _kernel_peaks,
    "iteration_times": _iteration_times,
}
