"""Fine-tuning of language models: a base in any number format, and adapters of peft on it."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab._util.checks import (
    Rule,
    anything,
    checked,
    choice,
    count,
    number,
    of_type,
    optional_lengths,
)
from memlab._util.functions import is_same_function
from memlab._util.units import is_a, shown
from memlab.errors import ConfigError, WorkloadError
from memlab.workload import FUNCTIONS, SampleSize, Workload, WorkloadChoices
from memlab.workloads.configs import ConfiguredModel, model_of, offered_sizes, own_loss
from memlab.workloads.published import BASES, is_of_hub, known_as
from memlab.workloads.quantizing import QUANTIZED, WEIGHT_ONLY, loading_of, quantize_linear_layers
from memlab.workloads.quantizing import finetune_import as finetune_import

USUAL_TOKENS = 512
MOST_TOKENS = 2**20
MOST_RANK = 2**16
MOST_WRITTEN = 32  # lengths in code that makes a workload
CAUSAL = "AutoModelForCausalLM"
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LOW_RANK = ("lora", "dora", "rslora")
PROMPTS = ("prefix", "prompt")
ADAPTERS = ("none", *LOW_RANK, "ia3", *PROMPTS)
BASE_FORMATS = (*FORMATS, *QUANTIZED)
RANKS = (4, 8, 16, 32, 64, 128, 256)
TARGETS = (None, "all-linear")  # that a panel offers


@dataclass(frozen=True, kw_only=True, slots=True)
class Finetuned:
    """A language model whose base may be frozen and quantized, and the adapter that is trained.

    The fields that are no others' are those of `finetune`.

    Attributes:
        label: the name of the base model.
        model: the base model, and the batches it takes.
    """

    label: str
    model: ConfiguredModel
    adapter: str
    rank: int
    num_virtual_tokens: int
    targets: str | tuple[str, ...] | None
    modules_to_save: tuple[str, ...]
    dropout: float
    base: str
    double_quantization: bool
    prepare_for_kbit: bool

    @property
    def is_quantized(self) -> bool:
        """Whether the linear layers of the base are quantized."""
        return self.base in QUANTIZED

    @property
    def built(self) -> ConfiguredModel:
        """The model of the base, in the number format that its weights have at first."""
        # a quantized layer multiplies in this format
        values = {**self.model.values, "dtype": FORMATS.get(self.base, "bfloat16")}
        return replace(self.model, values=values)

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that build it."""
        quantizes = "torchao" if self.base in WEIGHT_ONLY else "bitsandbytes"
        adapts = ("peft",) * (self.adapter != "none" or self.prepare_for_kbit)
        return ("transformers", *adapts, *(quantizes,) * self.is_quantized)

    def build(self) -> nn.Module:
        """Return the model, with random weights. It quantizes itself when it is moved."""
        model = self.built.build()
        # training needs nothing of what attention keeps for generating
        model.config.use_cache = False  # type: ignore[union-attr]
        if self.is_quantized:
            quantize_linear_layers(model, self.base, self.double_quantization, self.label)
        if self.adapter == "none":
            return model
        if self.base == "int8" or (self.adapter == "dora" and self.is_quantized):
            # DoRA begins with the norms of quantized weights. Over integers, unlike over weights in
            # 16 bits that are quantized later, peft rounds no new weights of an adapter to 16 bits.
            model.to("cpu")

        peft = finetune_import("peft")
        if self.prepare_for_kbit:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        names = _linear_layers(model)  # before peft has wrapped some of them
        try:
            name, values = self.peft_arguments
            adapted: nn.Module = peft.get_peft_model(model, getattr(peft, name)(**values))
        except ValueError as error:  # of targets that it does not find, for instance
            raise WorkloadError(_why_not_adapted(self, names, error)) from None
        return adapted

    def loading(self) -> tuple[str, dict[str, Any]] | None:
        """Return the config that has `from_pretrained` quantize the base, and its values, or None.

        Raises:
            UnsupportedError: it quantizes other layers than memlab.
        """
        if not self.is_quantized:
            return None
        with torch.device("meta"):
            model = self.built.build()
        return loading_of(model, self.base, self.double_quantization, self.label)

    @property
    def peft_arguments(self) -> tuple[str, dict[str, Any]]:
        """The name of peft's config for this adapter, and the values that it is given."""
        if self.adapter in PROMPTS:
            name = {"prefix": "PrefixTuningConfig", "prompt": "PromptTuningConfig"}[self.adapter]
            return name, {"task_type": "CAUSAL_LM", "num_virtual_tokens": self.num_virtual_tokens}

        targets = self.targets
        if targets is not None and not is_a(targets, str):
            targets = list(targets)  # type: ignore[assignment]
        given = {
            "task_type": "CAUSAL_LM",
            "target_modules": targets,
            "modules_to_save": list(self.modules_to_save) or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if self.adapter == "ia3":
            return "IA3Config", given
        low_rank = {"r": self.rank, "lora_alpha": 2 * self.rank, "lora_dropout": self.dropout}
        flag = {"dora": "use_dora", "rslora": "use_rslora"}.get(self.adapter)
        return "LoraConfig", {**low_rank, **({flag: True} if flag else {}), **given}

    @property
    def words(self) -> str:
        """What is trained, in words, such as "lora of rank 16 on nf4"."""
        how = f" of rank {self.rank}" if self.adapter in LOW_RANK else ""
        if self.adapter in PROMPTS:
            how = f" of {self.num_virtual_tokens} tokens"
        if self.has_targets and self.targets is not None:
            targets = self.targets
            if targets != "all-linear":  # a regular expression in quotes, or names
                targets = repr(targets) if is_a(targets, str) else ", ".join(targets)
            how += f" in {targets}"
        cast = ", prepared for k-bit training" if self.prepare_for_kbit else ""
        return f"{'all' if self.adapter == 'none' else self.adapter + how} on {self.base}{cast}"

    @property
    def has_targets(self) -> bool:
        """Whether the adapter is put on chosen layers."""
        return self.adapter in (*LOW_RANK, "ia3")

    @property
    def choices(self) -> WorkloadChoices:
        """Return what a panel offers; one value alone where no other has an effect."""
        offered: dict[str, tuple[Any, ...]] = {
            "adapter": ADAPTERS,
            "rank": tuple(sorted({self.rank, *(RANKS if self.adapter in LOW_RANK else ())})),
            "targets": tuple(dict.fromkeys((*TARGETS, self.targets))),
            "base": BASE_FORMATS,
            "prepare_for_kbit": (False, True),
        }
        if not self.has_targets:
            offered["targets"] = (self.targets,)
        values = {name: getattr(self, name) for name in offered}
        return WorkloadChoices(
            values=values, offered=offered, make_workload=partial(_chosen, made=self)
        )

    def check(self) -> None:
        """Raise WorkloadError if these choices do not go together."""
        if self.adapter == "none" and (self.is_quantized or self.prepare_for_kbit):
            field = f"base={self.base!r}" if self.is_quantized else "prepare_for_kbit=True"
            raise WorkloadError(
                f"{field} freezes the base, and with adapter='none' nothing would be trained; "
                "allowed is an adapter, such as 'lora', or a base of bf16, fp16 or fp32"
            )
        if self.base == "fp8-weight-only" and self.prepare_for_kbit:
            raise WorkloadError(
                "prepare_for_kbit=True makes the inputs of base='fp8-weight-only' fp32, and "
                "torchao multiplies its weights by bf16 alone; allowed is prepare_for_kbit=False, "
                "or base='int8-weight-only'"
            )
        if self.adapter == "dora" and self.base == "int8":
            raise WorkloadError(
                "adapter='dora' reads the weights of its base once more, and bitsandbytes loses "
                "the scales of base='int8' on the way; allowed is a base of nf4, fp4, bf16, fp16 "
                "or fp32, or adapter='lora'"
            )


def _targets(name: str, value: Any) -> str | tuple[str, ...] | None:
    if value is None or is_a(value, str):
        return value if value is None else of_type(name, value, str)
    found: tuple[str, ...] = of_type(name, value, tuple[str, ...])
    if not found:
        raise ConfigError(
            f"{name}=() names no module; give at least one, None for peft's choice, or 'all-linear'"
        )
    return found


def _tokens(name: str, value: Any) -> int | None:
    return None if value is None else count(1, MOST_TOKENS)(name, value)


CHOSEN: dict[str, Rule] = {
    "adapter": choice(*ADAPTERS),
    "rank": count(1, MOST_RANK),
    "targets": _targets,
    "base": choice(*BASE_FORMATS),
}


@checked(
    **CHOSEN,
    model=anything,
    num_virtual_tokens=count(1, MOST_RANK),
    dropout=number(0.0, 0.999),
    tokens=_tokens,
    lengths=optional_lengths,
)
def finetune(
    model: str | os.PathLike[str] = "llama-1b",
    *,
    adapter: str = "lora",
    rank: int = 16,
    num_virtual_tokens: int = 20,
    targets: str | tuple[str, ...] | None = None,
    modules_to_save: tuple[str, ...] = (),
    dropout: float = 0.0,
    base: str = "bf16",
    double_quantization: bool = True,
    prepare_for_kbit: bool = False,
    tokens: int | None = None,
    lengths: Sequence[int] | None = None,
    from_hub: bool = False,
) -> Workload:
    """Return a workload that fine-tunes a language model of transformers, with random weights.

    Nothing is downloaded. The adapter is what peft builds, in the number formats that it chooses:
    the weights of LoRA are fp32 on a base of 16 bits.

    Args:
        model: a name in `BASES`, also as it is published ("meta-llama/Llama-3.2-1B"), or what
            `from_config` takes.
        adapter: "lora", "dora", "rslora", "ia3", "prefix", "prompt", or "none": all weights are
            trained.
        rank: of the low-rank adapters; alpha is twice the rank, which costs nothing.
        num_virtual_tokens: of prefix and prompt tuning.
        targets: the layers with an adapter: their names, a regular expression, "all-linear", or
            None for those that peft chooses for this architecture.
        modules_to_save: names of modules that are trained as a whole beside the adapter.
        dropout: in the low-rank adapters.
        base: the number format of the base: "fp32", "bf16", "fp16"; quantized by bitsandbytes:
            "nf4", "fp4", "int8"; or by torchao: "int8-weight-only", "fp8-weight-only". Its layers
            multiply in bf16 ("int8": in 8 bits).
        double_quantization: whether the scales of 4-bit weights are quantized too.
        prepare_for_kbit: whether peft's `prepare_model_for_kbit_training` casts all weights that
            are not quantized (norms, embeddings, head) to fp32.
        tokens: of a sample; None is 512, or as many as the model takes if they are fewer.
        lengths: of the data set's samples, one int for each, which `predict_lengths` then takes. A
            step is of `tokens` all the same.
        from_hub: as in `from_config`.

    Raises:
        WorkloadError: the model or a value is not allowed; the message says what is. A library that
            is missing is named when a run begins, targets that are not found when the model is
            built.

    >>> import memlab
    >>> memlab.workloads.finetune("llama-1b", adapter="lora", rank=16, base="nf4").name
    'llama-1b, lora of rank 16 on nf4, sequence length 512'
    """
    label, configured = _configured(model, tokens, from_hub)
    made = Finetuned(
        label=label,
        model=configured,
        adapter=adapter,
        rank=rank,
        num_virtual_tokens=num_virtual_tokens,
        targets=targets,
        modules_to_save=modules_to_save,
        dropout=dropout,
        base=base,
        double_quantization=double_quantization,
        prepare_for_kbit=prepare_for_kbit,
    )
    return replace(_sized(configured.size, made=made), lengths=optional_lengths("lengths", lengths))


def made_of(workload: Workload) -> Finetuned | None:
    """Return what `finetune` made the model of this workload with; None for any other."""
    made = getattr(workload.build_model, "__self__", None)
    return made if isinstance(made, Finetuned) else None


def finetune_options(workload: Workload) -> dict[str, Any] | None:
    """Return the arguments with which `finetune` makes this workload; None for any other.

    Left out are those with their usual value, and more lengths than `MOST_WRITTEN`.
    """
    made = made_of(workload)
    if made is None or made.model.values != BASES.get(made.label):
        return None
    own = _sized(made.model.size, made=made)
    if not all(is_same_function(getattr(workload, name), getattr(own, name)) for name in FUNCTIONS):
        return None  # a person replaced one, such as the loss
    usual = inspect.signature(finetune).parameters
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    given = {
        name: value
        for name, value in values.items()
        if name not in ("label", "model") and value != usual[name].default
    }
    least = min(USUAL_TOKENS, made.model.values["max_position_embeddings"])
    sized: dict[str, Any] = {} if made.model.size == least else {"tokens": made.model.size}
    if workload.lengths is not None and len(workload.lengths) <= MOST_WRITTEN:
        sized["lengths"] = workload.lengths
    return {"model": made.label, **given, **sized}


def _sized(size: int, *, made: Finetuned) -> Workload:
    """Return the workload with samples of this many tokens, which its name says."""
    made.check()
    _check_length(made.label, made.model, size)
    made = replace(made, model=replace(made.model, size=size))
    sample_size = SampleSize(
        name="sequence length",
        unit="tokens",
        value=size,
        offered=offered_sizes(size),
        make_workload=partial(_sized, made=made),
    )
    return Workload(
        name=f"{made.label}, {made.words}, {sample_size}",
        build_model=made.build,
        make_batch=made.model.batch,
        compute_loss=own_loss,
        sample_size=sample_size,
        choices=made.choices,
    )


@checked(**CHOSEN)
def _chosen(
    *,
    made: Finetuned,
    adapter: str,
    rank: int,
    targets: str | tuple[str, ...] | None,
    base: str,
    prepare_for_kbit: bool,
) -> Workload:
    """Return the workload with other choices, in the same sample size."""
    other = replace(
        made, adapter=adapter, rank=rank, targets=targets, base=base,
        prepare_for_kbit=prepare_for_kbit,
    )  # fmt: skip
    return _sized(made.model.size, made=other)


def _configured(
    model: Any, tokens: int | None, from_hub: bool = False
) -> tuple[str, ConfiguredModel]:
    """Return the name and the config of a model that is given by name or path."""
    is_name = is_a(model, str) and not os.path.exists(model)
    known = known_as(model, BASES) if is_name and not is_of_hub(model, from_hub) else None
    if known is not None:
        values = dict(BASES[known])
        size = tokens or min(USUAL_TOKENS, values["max_position_embeddings"])
        return known, ConfiguredModel(auto_class=CAUSAL, values=values, size=size)
    label, found = model_of(model, tokens, from_hub=from_hub)
    if found.auto_class != CAUSAL:
        raise WorkloadError(
            f"model={shown(str(model))} is no causal language model but one for "
            f"{found.auto_class}; write a function that returns a memlab.Workload, whose "
            "build_model calls peft.get_peft_model"
        )
    return label, replace(found, size=tokens or min(found.size, USUAL_TOKENS))


def _check_length(label: str, model: ConfiguredModel, size: int) -> None:
    most: Any = model.values.get("max_position_embeddings")
    if most is None:  # the default of a config that was given as a file
        most = getattr(model.config().get_text_config(), "max_position_embeddings", None)
    if is_a(most, int) and size > most:
        raise WorkloadError(
            f"tokens={size} is more than {label} takes: its config has "
            f"max_position_embeddings={most}; allowed are 1 to {most}"
        )


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's linear layers, each once."""
    paths = (path for path, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted({path.rpartition(".")[2] for path in paths})


def _why_not_adapted(made: Finetuned, names: Sequence[str], error: ValueError) -> str:
    """Return the message of an adapter that peft cannot build on a model with these layers."""
    return (
        f"peft cannot put {made.adapter} with targets={shown(made.targets)} on {made.label}: "
        f"{' '.join(str(error).split())[:200]}; its linear layers are named {', '.join(names)}"
    )
