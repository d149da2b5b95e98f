"""Which fields of transformers' TrainingArguments do not concern the step, and why.

The names are those of transformers 5.23 and of older versions, back to 4.0.
"""

LOGGING = "it is about logging and reports"
EVALUATION = "it is about evaluation"
SAVING = "it is about saving and publishing"
LENGTH = "it is about how long the training lasts and what the script does"
LOADING = "it is about how batches are loaded; memlab.measure_loading has its own settings"
SEEDS = "memlab takes a seed when it builds a step"
PROCESSES = "it is about communication between processes"
DEVICE = "memlab is given the device when it measures or predicts"

NOT_CONCERNED: dict[str, tuple[str, ...]] = {
    LOGGING: (
        "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
        "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level",
        "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "debug",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics",
        "logging_dir", "include_tokens_per_second", "tpu_metrics_debug",
    ),
    EVALUATION: (
        "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size",
        "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
        "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
        "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "load_best_model_at_end",
        "metric_for_best_model", "greater_is_better", "do_eval", "do_predict",
        "evaluation_strategy", "evaluate_during_training", "include_inputs_for_metrics",
        "per_gpu_eval_batch_size", "use_legacy_prediction_loop", "jit_mode_eval",
        "generation_max_length", "generation_num_beams", "generation_config",
        "predict_with_generate",
    ),
    SAVING: (
        "output_dir", "save_only_model", "save_strategy", "save_steps", "save_on_each_node",
        "save_total_limit", "enable_jit_checkpoint", "push_to_hub", "hub_token",
        "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
        "overwrite_output_dir", "save_safetensors", "push_to_hub_model_id",
        "push_to_hub_organization", "push_to_hub_token",
    ),
    LENGTH: (
        "num_train_epochs", "max_steps", "do_train", "resume_from_checkpoint", "ignore_data_skip",
        "restore_callback_states_from_checkpoint", "ray_scope",
    ),
    LOADING: (
        "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
        "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "dataloader_in_order", "train_sampling_strategy",
        "length_column_name", "group_by_length", "dispatch_batches",
    ),
    SEEDS: ("seed", "data_seed"),
    PROCESSES: (
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers",
        "ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "xpu_backend",
        "average_tokens_across_devices",
    ),
    DEVICE: ("use_cpu", "no_cuda", "use_mps_device", "tpu_num_cores"),
}  # fmt: skip

SHARDED = (
    "sharding is not imported: the config is the step of one process, which holds the whole model; "
    "pass world_size, the number of ranks, to import it"
)
NOT_IMPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "fsdp": ((None, "", False), SHARDED),
    "fsdp_config": ((None,), SHARDED),
    "fsdp_min_num_params": ((0,), SHARDED),
    "fsdp_transformer_layer_cls_to_wrap": ((None,), SHARDED),
    "deepspeed": (
        (None,),
        f"{SHARDED}; memlab.from_trainer of the DeepSpeed file itself says what it holds",
    ),
    "sharded_ddp": ((None, "", False), SHARDED),
    "parallelism_config": ((None,), SHARDED),
    "mp_parameters": ((None, ""), SHARDED),
    "split_batches": (
        (None, False),
        "batches that are divided among processes are not imported; batch_size is that of one "
        "process",
    ),
    "auto_find_batch_size": (
        (False,),
        "memlab never changes the batch size by itself; the config has the size that the Trainer "
        "tries first",
    ),
    "use_liger_kernel": (
        (False,),
        "memlab does not replace kernels of a model; build the model with Liger's kernels instead",
    ),
    "liger_kernel_config": ((None,), "memlab does not replace kernels of a model"),
    "neftune_noise_alpha": (
        (None,), "the noise on the embeddings is not added; it takes memory of one embedding output"
    ),
    "torch_empty_cache_steps": (
        (None,), "memlab does not empty the allocator's cache during a step"
    ),
    "full_determinism": (
        (False,), "memlab does not switch to deterministic kernels; they may need other memory"
    ),
    "optim_target_modules": ((None,), "memlab's optimizers update all trainable parameters alike"),
    "jit_mode": ((None, False), "memlab does not script models"),
    "use_ipex": ((None, False), "memlab does not use Intel's extension for PyTorch"),
    "past_index": ((-1,), "memlab does not carry hidden states from one batch to the next"),
}  # fmt: skip
