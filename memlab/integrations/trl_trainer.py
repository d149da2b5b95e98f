"""trl's `SFTTrainer` and `DPOTrainer`: which of their methods and fields become what.

Their losses are computed by their own code (`transformers_workload.py`). Their data sets have been
prepared (tokenized, cut, packed) when they are built, so that a batch needs none of the fields
again.
"""

from typing import Any

from memlab.integrations.reading import IT_IS_OFF, NO_WORKLOAD, SourceReading
from memlab.integrations.transformers_arguments import EVALUATION, LOADING

TRAINERS = ("SFTTrainer", "DPOTrainer")
PREPARED = "the data set has been prepared by it"
BUILT = "the model and the tokenizer have been made by it"
UPDATED = "it is about an update of the reference model between steps"
NOT_CONCERNED: dict[str, tuple[str, ...]] = {
    BUILT: ("model_init_kwargs", "trust_remote_code", "chat_template_path", "eos_token",
            "pad_token"),
    EVALUATION: ("eval_packing",),
    LOADING: ("dataset_num_proc", "precompute_ref_batch_size"),
    UPDATED: ("ref_model_mixup_alpha", "ref_model_sync_steps"),
}  # fmt: skip
INTO: dict[str, tuple[str, ...]] = {
    "make_batch": (
        "dataset_text_field", "dataset_kwargs", "max_length", "truncation_mode", "shuffle_dataset",
        "packing", "packing_strategy", "padding_free", "pad_to_multiple_of",
        "completion_only_loss", "assistant_only_loss", "precompute_ref_log_probs",
    ),
    "compute_loss": (
        "loss_type", "router_aux_loss_coef", "loss_weights", "ld_alpha", "f_divergence_type",
        "f_alpha_divergence_coef", "label_smoothing", "beta", "use_weighting", "discopop_tau",
    ),
    "build_model": ("disable_dropout",),
}  # fmt: skip
NOT_IMPORTED: dict[str, str] = {
    "activation_offloading": "trl moves activations to host memory by its own hooks; "
    "offload_activations of memlab does so in another way",
    "sync_ref_model": "memlab's step does not update the reference model",
}


def is_of_trl(kind: type) -> bool:
    """Return whether a class is trl's own."""
    return kind.__module__.partition(".")[0] == "trl"


def is_taken(owner: type) -> bool:
    """Return whether a class is one of trl's trainers whose step memlab takes."""
    return is_of_trl(owner) and owner.__name__ in TRAINERS


def joins_samples(trainer: Any) -> bool:
    """Return whether the batches of a trainer have other rows than samples.

    Sequences without padding are laid end to end, and the chosen answers of pairs come before the
    rejected ones.
    """
    owners = [kind.__name__ for kind in type(trainer).__mro__ if is_taken(kind)]
    return bool(owners) and (
        "DPOTrainer" in owners or bool(getattr(trainer, "padding_free", False))
    )


def read_trl(reading: SourceReading, arguments: Any, has_workload: bool) -> None:
    """Report the fields that trl adds to TrainingArguments; nothing if they are not trl's."""
    if not any(is_of_trl(kind) for kind in type(arguments).__mro__):
        return
    for why, names in NOT_CONCERNED.items():
        reading.skip_all(names, why)
    for name, why in NOT_IMPORTED.items():
        reading.leave_unless((False,), name, why)
    for part, names in INTO.items():
        for name in names:
            value = reading.values.get(name)
            if value is None or value is False:
                reading.skip(name, IT_IS_OFF)
            elif has_workload:
                reading.take_into(part, name, PREPARED if part == "make_batch" else "")
            else:
                reading.leave(name, NO_WORKLOAD)
