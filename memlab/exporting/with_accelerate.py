"""The flavor `accelerate`: a loop of one's own, with precision and accumulation by accelerate."""

import torch

from memlab.config import Precision, StepConfig
from memlab.exporting.library_parts import library_parts
from memlab.exporting.whole_file import Loop
from memlab.plan import Plan
from memlab.workload import Workload

MAIN = '''
def main():
    """Train for NUM_STEPS updates, and print the loss of each."""
    set_seed(SEED)
    accelerator = Accelerator(
        cpu={cpu},
        mixed_precision="{precision}",
        # accelerate divides each loss by this number
        gradient_accumulation_steps=ACCUMULATION_STEPS,
    )
    model = make_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
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
        print(f"step {{step}}: loss {{total}}")
'''.strip()

CLIP = """\
if accelerator.sync_gradients:  # the norm is that of the whole batch's gradient
                    accelerator.clip_grad_norm_(parameters, {!r})
                """


def loop(workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None) -> Loop:
    """Return the loop with accelerate."""
    parts = library_parts(workload, config, device, plan)
    clip = ""
    if config.max_grad_norm is not None:
        clip = CLIP.format(config.max_grad_norm)
    main = MAIN.format(
        cpu=device.type == "cpu",
        precision="bf16" if config.precision is Precision.BF16_MIXED else "no",
        optimizer="\n    ".join(parts.optimizer),
        clip=clip,
    )
    return Loop(
        title="accelerate",
        imports=[*parts.imports, "from accelerate import Accelerator"],
        functions=[*parts.functions, main],
        calls=parts.calls,
        settings=(f"ACCUMULATION_STEPS = {config.accumulation_steps}  # micro-batches",),
        needs="accelerate: pip install accelerate",
    )
