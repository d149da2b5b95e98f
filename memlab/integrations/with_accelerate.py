"""The flavor `accelerate`: a loop of one's own, with precision and accumulation by accelerate."""

import torch

from memlab.config import FULLY_SHARDED, Precision, Sharding, StepConfig
from memlab.integrations.library_parts import CLASSES, library_parts, of_ranks
from memlab.integrations.script_file import Loop
from memlab.techniques.technique import Plan
from memlab.workload import Workload

MAIN = '''
def main():
    """Train for NUM_STEPS updates, and print the loss of each."""
    set_seed(SEED)
    {plugin}accelerator = Accelerator(
        cpu={cpu},
        mixed_precision="{precision}",
        # accelerate divides each loss by this number
        {accumulation},
    )
    model = make_model()
    {classes}parameters = [p for p in model.parameters() if p.requires_grad]
    {optimizer}
    # no loader is given to accelerate, which would split its batches among processes
    model, optimizer = accelerator.prepare(model, optimizer)
    micro_batches = make_micro_batches()
    for step in range(1, NUM_STEPS + 1):
        total = 0.0
        for micro_batch in micro_batches:
            micro_batch = tree_map_only(
                torch.Tensor, lambda t: t.to(accelerator.device), micro_batch
            )
            with accelerator.accumulate(model):
                with accelerator.autocast():  # the loss is part of what is autocast
                    loss = compute_loss(model, micro_batch)
                total += loss.item() / ACCUMULATION_STEPS
                accelerator.backward(loss)
                del loss, micro_batch
                {clip}# accelerate skips both until the last micro-batch
                optimizer.step()
                optimizer.zero_grad()
        {report}
'''.strip()

CLIP = """\
if accelerator.sync_gradients:  # the norm is that of the whole batch's gradient
                    accelerator.clip_grad_norm_({}, {!r})
                """


ACCUMULATION = "gradient_accumulation_steps=ACCUMULATION_STEPS"
AVERAGED = """\
gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=ACCUMULATION_STEPS,
            sync_each_batch={},  # whether the ranks average gradients after each micro-batch
        )"""
SHARDED = """,
        fsdp_plugin=plugin"""
PLUGIN = """\
plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward={},  # whether a block is freed after its forward
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,{}
    )
    """
NARROW = """
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),"""
NAMED = """\
plugin.transformer_cls_names_to_wrap = sharded_classes(model)
    """
REPORT = 'print(f"step {step}: loss {total}")'
OF_RANKS = """\
total = mean_of_ranks(total, accelerator.device)
        accelerator.print(f"step {step}: loss {total}")
    accelerator.end_training()  # leave the group, or Gloo's threads may abort"""


def loop(workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None) -> Loop:
    """Return the loop with accelerate."""
    parts = library_parts(workload, config, device, plan)
    is_sharded = config.sharding is not Sharding.NONE
    is_divided = config.sharding in FULLY_SHARDED
    clip = ""
    if config.max_grad_norm is not None:
        # sharding gives the model other parameters
        whose = "model.parameters()" if is_divided else "parameters"
        clip = CLIP.format(whose, config.max_grad_norm)
    main = MAIN.format(
        cpu=device.type == "cpu",
        precision="bf16" if config.precision is Precision.BF16_MIXED else "no",
        optimizer="\n    ".join(parts.optimizer),
        clip=clip,
        report=OF_RANKS if is_sharded else REPORT,
        **_sharded(config),
    )
    found = Loop(
        title="accelerate",
        imports=[*parts.imports, "from accelerate import Accelerator", *_imports(config)],
        functions=[*parts.functions, *[CLASSES] * is_divided, main],
        calls=parts.calls,
        settings=(f"ACCUMULATION_STEPS = {config.accumulation_steps}  # micro-batches",),
        needs="accelerate: pip install accelerate",
    )
    return of_ranks(found, config) if is_sharded else found


def _sharded(config: StepConfig) -> dict[str, str]:
    """Return what the Accelerator is told about several ranks."""
    accumulation = ACCUMULATION
    if config.sharding is not Sharding.NONE and config.accumulation_steps > 1:
        accumulation = AVERAGED.format(config.sync_each_micro_batch)
    if config.sharding not in FULLY_SHARDED:
        return {"plugin": "", "accumulation": accumulation, "classes": ""}
    narrow = NARROW if config.precision is Precision.BF16_MIXED else ""
    return {
        "plugin": PLUGIN.format(config.sharding is not Sharding.ZERO2, narrow),
        "accumulation": accumulation + SHARDED,
        "classes": NAMED,
    }


def _imports(config: StepConfig) -> list[str]:
    """Return the imports of what the Accelerator is told about several ranks."""
    found = []
    if config.sharding is not Sharding.NONE and config.accumulation_steps > 1:
        found.append("from accelerate.utils import GradientAccumulationPlugin")
    if config.sharding in FULLY_SHARDED:
        found.append("from accelerate import FullyShardedDataParallelPlugin")
        if config.precision is Precision.BF16_MIXED:
            found.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
    return found
