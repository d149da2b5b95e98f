"""Settings of public training recipes, for the benchmark and the tests of importing.

Each has a one-line source. Only settings are taken, and of these the ones that a recipe sets. Names
that transformers 5 has renamed are given as it names them now: `eval_strategy` for
`evaluation_strategy`, a fraction in `warmup_steps` for `warmup_ratio`, and
`train_sampling_strategy="group_by_length"` for `group_by_length`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RecipeKind(StrEnum):
    """What kind of source a recipe configures."""

    TRANSFORMERS = "TrainingArguments"
    DEEPSPEED = "DeepSpeed"
    ACCELERATE = "accelerate"
    LIGHTNING = "Lightning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One published configuration.

    Attributes:
        name: short.
        kind: what it configures.
        source: where it is published.
        settings: as published, as far as they are training settings.
        expected: what memlab's config must have of it.
    """

    name: str
    kind: RecipeKind
    source: str
    settings: dict[str, Any]
    expected: dict[str, Any]


def _zero2() -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"},
                              "contiguous_gradients": True, "overlap_comm": True},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32,
                 "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }  # fmt: skip


def _launch(**settings: Any) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no",
        "machine_rank": 0, "main_training_function": "main", "num_machines": 1,
        "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
        "tpu_use_sudo": False, "use_cpu": False,
    } | settings  # fmt: skip


T, D, A, L = RecipeKind
RECIPES = (
    Recipe(
        name="Alpaca 7B", kind=T, source="tatsu-lab/stanford_alpaca, README",
        settings={
            "bf16": True, "num_train_epochs": 3, "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 8,
            "eval_strategy": "no", "save_strategy": "steps", "save_steps": 2000,
            "save_total_limit": 1, "learning_rate": 2e-5, "weight_decay": 0.0,
            "warmup_steps": 0.03, "lr_scheduler_type": "cosine", "logging_steps": 1, "tf32": True,
            "optim": "adamw_torch", "fsdp": "full_shard auto_wrap",
        },
        expected={"batch_size": 32, "accumulation_steps": 8, "precision": "bf16-mixed",
                  "max_grad_norm": 1.0, "optimizer": "adamw"},
    ),
    Recipe(
        name="Guanaco 7B (QLoRA)", kind=T,
        source="artidoro/qlora, scripts/finetune_guanaco_7b.sh, with the defaults of qlora.py",
        settings={
            "logging_steps": 10, "save_strategy": "steps", "data_seed": 42, "save_steps": 500,
            "save_total_limit": 40, "eval_strategy": "steps", "per_device_eval_batch_size": 4,
            "dataloader_num_workers": 3, "train_sampling_strategy": "group_by_length",
            "logging_strategy": "steps", "remove_unused_columns": False, "do_train": True,
            "do_eval": True, "bf16": True, "warmup_steps": 0.03, "lr_scheduler_type": "constant",
            "gradient_checkpointing": True, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4, "max_steps": 1875, "eval_steps": 187,
            "learning_rate": 2e-4, "adam_beta2": 0.999, "max_grad_norm": 0.3, "weight_decay": 0.0,
            "seed": 0, "optim": "paged_adamw_32bit",
        },
        expected={"batch_size": 16, "accumulation_steps": 4, "precision": "bf16-mixed",
                  "max_grad_norm": 0.3, "checkpointing": "blocks", "model_cache": False},
    ),
    Recipe(
        name="Zephyr 7B SFT (QLoRA)", kind=T,
        source="huggingface/alignment-handbook, recipes/zephyr-7b-beta/sft/config_qlora.yaml",
        settings={
            "bf16": True, "do_eval": True, "eval_strategy": "epoch",
            "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "hub_model_id": "zephyr-7b-sft-qlora", "hub_strategy": "every_save",
            "learning_rate": 2e-4, "log_level": "info", "logging_steps": 5,
            "logging_strategy": "steps", "lr_scheduler_type": "cosine", "max_steps": -1,
            "num_train_epochs": 1, "per_device_eval_batch_size": 8,
            "per_device_train_batch_size": 4, "push_to_hub": True, "report_to": ["tensorboard"],
            "save_strategy": "steps", "save_steps": 100, "save_total_limit": 1, "seed": 42,
            "warmup_steps": 0.1,
        },
        expected={"batch_size": 8, "accumulation_steps": 2, "checkpointing": "blocks",
                  "optimizer_implementation": "fused"},
    ),
    Recipe(
        name="8-bit AdamW, fp16", kind=T, source="Unsloth's notebooks",
        settings={
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "warmup_steps": 5,
            "max_steps": 60, "learning_rate": 2e-4, "fp16": True, "logging_steps": 1,
            "optim": "adamw_8bit", "weight_decay": 0.01, "lr_scheduler_type": "linear",
            "seed": 3407,
        },
        expected={"batch_size": 8, "precision": "fp16-mixed", "optimizer": "adamw-8bit"},
    ),
    Recipe(
        name="FNet on MRPC", kind=T, source="gchhablani/fnet-base-finetuned-mrpc, model card",
        settings={
            "do_train": True, "do_eval": True, "per_device_train_batch_size": 16,
            "learning_rate": 2e-5, "num_train_epochs": 5, "push_to_hub": True,
            "hub_strategy": "all_checkpoints", "logging_strategy": "epoch",
            "save_strategy": "epoch", "eval_strategy": "epoch",
        },
        expected={"batch_size": 16, "accumulation_steps": 1, "precision": "as-built"},
    ),
    Recipe(
        name="BERT on MNLI", kind=T, source="vuiseng9/bert-base-uncased-mnli, model card",
        settings={
            "do_eval": True, "do_train": True, "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 16, "num_train_epochs": 3,
        },
        expected={"batch_size": 16, "max_grad_norm": 1.0, "optimizer_implementation": "fused"},
    ),
    Recipe(
        name="LiteLlama 460M", kind=T, source="mesolitica/malaya, session/litellama/train.sh",
        settings={
            "per_device_train_batch_size": 24, "gradient_accumulation_steps": 1, "bf16": True,
            "do_train": True, "do_eval": False, "num_train_epochs": 2, "logging_steps": 1,
            "learning_rate": 2e-5, "save_steps": 200, "gradient_checkpointing": True,
            "log_level": "info",
        },
        expected={"batch_size": 24, "precision": "bf16-mixed", "checkpointing": "blocks"},
    ),
    Recipe(
        name="Mistral 191M", kind=T,
        source="mesolitica/malaya, pretrained-model/mistral/run-191M.sh",
        settings={
            "per_device_train_batch_size": 38, "gradient_accumulation_steps": 1, "bf16": True,
            "do_train": True, "do_eval": False, "num_train_epochs": 10, "logging_steps": 1,
            "learning_rate": 2e-4, "save_steps": 200, "save_total_limit": 2, "warmup_steps": 50,
            "gradient_checkpointing": True,
        },
        expected={"batch_size": 38, "model_cache": False, "max_grad_norm": 1.0},
    ),
    Recipe(
        name="Whisper large, ATC", kind=T, source="aether-raid/astra-atc-models, hyperparameters",
        settings={
            "optim": "adamw_bnb_8bit", "learning_rate": 1e-5, "lr_scheduler_type": "linear",
            "warmup_steps": 0.05, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
            "weight_decay": 0.01, "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 16,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False}, "fp16": True,
            "max_grad_norm": 1.0, "num_train_epochs": 25, "label_smoothing_factor": 0.0,
            "seed": 42,
        },
        expected={"batch_size": 16, "accumulation_steps": 16, "optimizer": "adamw-8bit",
                  "precision": "fp16-mixed", "checkpointing": "blocks"},
    ),
    Recipe(
        name="BLOOM 560M", kind=T, source="Markfryazino/EfficientDL-DeepSpeedPhD, zero2-small.sh",
        settings={
            "fp16": True, "num_train_epochs": 1, "do_train": True, "do_eval": True,
            "eval_strategy": "steps", "save_strategy": "no", "eval_steps": 10,
            "logging_steps": 10, "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 64, "learning_rate": 2e-5, "seed": 42,
            "deepspeed": "deepspeed/zero2.json",
        },
        expected={"batch_size": 64, "precision": "fp16-mixed"},
    ),
    Recipe(
        name="turbo-alignment, ZeRO 3", kind=D,
        source="turbo-llm/turbo-alignment, tests/sequence_parallel/consts.py",
        settings={
            "fp16": {"enabled": False}, "bf16": {"enabled": True},
            "scheduler": {"type": "WarmupDecayLR", "params": {
                "warmup_min_lr": 0.1, "warmup_max_lr": 0.1, "warmup_num_steps": 1,
                "total_num_steps": 100}},
            "zero_optimization": {
                "stage": 3, "allgather_partitions": True, "allgather_bucket_size": 1e5,
                "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": "auto",
                "contiguous_gradients": True, "sub_group_size": 1e5,
                "stage3_param_persistence_threshold": "auto", "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
                "stage3_gather_16bit_weights_on_model_save": True},
            "gradient_accumulation_steps": 1, "gradient_clipping": "auto", "steps_per_print": 2,
            "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1,
            "wall_clock_breakdown": False,
        },
        expected={"batch_size": 1, "precision": "bf16-master"},
    ),
    Recipe(
        name="axolotl, ZeRO 2", kind=D,
        source="axolotl-ai-cloud/axolotl, deepspeed_configs/zero2.json",
        settings=_zero2(), expected={"batch_size": 8, "precision": "as-built"},
    ),
    Recipe(
        name="axolotl, ZeRO 3 in bf16", kind=D,
        source="axolotl-ai-cloud/axolotl, deepspeed_configs/zero3_bf16.json",
        settings={
            "zero_optimization": {
                "stage": 3, "overlap_comm": True, "contiguous_gradients": True,
                "sub_group_size": 0, "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto",
                "param_persistence_threshold": "auto", "max_live_parameters": 0,
                "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True}, "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
        },
        expected={"precision": "bf16-master"},
    ),
    Recipe(
        name="axolotl, first ZeRO 2", kind=D,
        source="axolotl, deepspeed/zero2.json, with optimizer and scheduler",
        settings=_zero2() | {
            "optimizer": {"type": "AdamW", "params": {
                "lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupDecayLR", "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                "total_num_steps": "auto"}},
        },
        expected={"optimizer": "adamw", "optimizer_implementation": "fused"},
    ),
    Recipe(
        name="hana, ZeRO 2 offload", kind=D, source="IDEA-Research/hana, config/deepspeed.py",
        settings={
            "zero_allow_untested_optimizer": True,
            "scheduler": {"type": "WarmupLR", "params": {
                "last_batch_iteration": -1, "warmup_min_lr": 0, "warmup_max_lr": 1e-4,
                "warmup_num_steps": 10000}},
            "zero_optimization": {
                "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "contiguous_gradients": True, "overlap_comm": True,
                "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8},
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000,
                     "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
            "steps_per_print": 100, "train_micro_batch_size_per_gpu": 8,
            "activation_checkpointing": {
                "partition_activations": False, "cpu_checkpointing": False,
                "contiguous_memory_optimization": False, "number_checkpoints": False,
                "synchronize_checkpoint_boundary": False, "profile": False},
        },
        expected={"batch_size": 8, "precision": "fp16-mixed"},
    ),
    Recipe(
        name="accelerate, FSDP template", kind=A,
        source="huggingface/accelerate, examples/config_yaml_templates/fsdp.yaml",
        settings={
            "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2,
            "fsdp_config": {
                "fsdp_activation_checkpointing": False,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_forward_prefetch": False, "fsdp_offload_params": False,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_sync_module_states": True,
                "fsdp_use_orig_params": True},
        },
        expected={"precision": "bf16-mixed"},
    ),
    Recipe(
        name="alignment-handbook, ZeRO 3", kind=A,
        source="huggingface/alignment-handbook, recipes/accelerate_configs/deepspeed_zero3.yaml",
        settings=_launch(
            deepspeed_config={
                "deepspeed_multinode_launcher": "standard", "offload_optimizer_device": "cpu",
                "offload_param_device": "cpu", "zero3_init_flag": True,
                "zero3_save_16bit_model": True, "zero_stage": 3},
            distributed_type="DEEPSPEED", mixed_precision="bf16", num_processes=1,
        ),
        expected={"precision": "bf16-mixed"},
    ),
    Recipe(
        name="accelerate, one GPU with dynamo", kind=A,
        source="what `accelerate config` writes for one GPU with dynamo and fp16",
        settings=_launch(
            distributed_type="NO", mixed_precision="fp16", num_processes=1, gpu_ids="all",
            enable_cpu_affinity=False, dynamo_config={
                "dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead",
                "dynamo_use_dynamic": False, "dynamo_use_fullgraph": False},
        ),
        expected={"precision": "fp16-mixed", "compile": True, "compile_mode": "reduce-overhead"},
    ),
    Recipe(
        name="uwuLLM", kind=L, source="the section [lightning] of uwuLLM's test config",
        settings={"precision": "bf16-true", "gradient_clip_val": 0.1, "max_epochs": 5},
        expected={"precision": "bf16", "max_grad_norm": 0.1},
    ),
    Recipe(
        name="Lightning, effective training", kind=L,
        source="Lightning's guide to effective training techniques",
        settings={"precision": "16-mixed", "gradient_clip_val": 0.5,
                  "gradient_clip_algorithm": "value", "accumulate_grad_batches": 7,
                  "max_epochs": 10},
        # Lightning itself makes bf16-mixed of 16-mixed on a CPU
        expected={"max_grad_norm": None, "accumulation_steps": 7},
    ),
)  # fmt: skip
