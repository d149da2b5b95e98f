"""The flavor `transformers`: TrainingArguments and a Trainer whose own defaults are set aside."""

import torch

from memlab.config import FULLY_SHARDED, Precision, Sharding, StepConfig
from memlab.integrations.library_parts import CLASSES, library_parts, of_ranks
from memlab.integrations.library_parts import REPORT as REPORT_RANKS
from memlab.integrations.script_file import Loop
from memlab.techniques.technique import Plan
from memlab.workload import Workload

TRAINER = '''
class Training(Trainer):
    """The step, for the loop of transformers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # else the loss of a model with **kwargs is taken for one that is divided already
        self.model_accepts_loss_kwargs = False
        self.micro_batches = []
        self.losses = []  # of each micro-batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss of a micro-batch; the Trainer divides it by their number."""
        loss = compute_loss(model, inputs["batch"])
        self.losses.append(loss.detach())
        return loss

    def get_train_dataloader(self):
        """Return the micro-batches in their order; the Trainer's own loader shuffles."""
        return DataLoader(
            [{{"batch": batch}} for batch in self.micro_batches * NUM_STEPS],
            batch_size=None,  # they are batches already
            collate_fn=as_it_is,
            generator=torch.Generator(),  # so that no random number of the step is used up
        )
'''.strip()

AS_IT_IS = '''
def as_it_is(batch):
    """Return a batch unchanged; the loader's own function would make lists of its tuples."""
    return batch
'''.strip()

MAIN = '''
def main():
    """Train for NUM_STEPS updates, and print the loss of each."""
    set_seed(SEED)
    model = make_model()
    {optimizer}arguments = TrainingArguments(
        output_dir=".",
        use_cpu={cpu},
        bf16={is_mixed},
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH_SIZE // {divisor},
        gradient_accumulation_steps=ACCUMULATION_STEPS,
        {norm}
        lr_scheduler_type="constant",  # the default lowers the learning rate to zero
        seed=SEED,
        {fsdp}# what the Trainer does besides training
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )
    # with an optimizer of our own, not the Trainer's fused AdamW
    trainer = Training(model=model, args=arguments{given})
    trainer.micro_batches = make_micro_batches()
    trainer.train()
    {report}
'''.strip()

MADE_BEFORE = """\
parameters = [p for p in model.parameters() if p.requires_grad]
    {}
    """
CREATE = '''

    def create_optimizer(self, model=None):
        """Return the optimizer of what this rank holds; the Trainer asks once it has sharded."""
        model = self.model if model is None else model
        parameters = [p for p in model.parameters() if p.requires_grad]
        {}
        self.optimizer = optimizer
        return optimizer'''
FSDP = """\
fsdp=True,
        fsdp_config={{
            "version": 2,
            "reshard_after_forward": {},  # whether whole parameters are freed after a forward
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": sharded_classes(model),
        }},
        """
REPORT = """\
for step in range(NUM_STEPS):
        parts = trainer.losses[step * ACCUMULATION_STEPS : (step + 1) * ACCUMULATION_STEPS]
        print(f"step {step + 1}: loss {float(sum(parts)) / ACCUMULATION_STEPS}")"""


def loop(workload: Workload, config: StepConfig, device: torch.device, plan: Plan | None) -> Loop:
    """Return the Trainer of transformers and its arguments."""
    parts = library_parts(workload, config, device, plan)
    norm = "max_grad_norm=0.0,  # the default clips at 1.0"
    if config.max_grad_norm is not None:
        norm = f"max_grad_norm={config.max_grad_norm!r},"
    is_sharded = config.sharding is not Sharding.NONE
    is_divided = config.sharding in FULLY_SHARDED
    create = CREATE.format("\n        ".join(parts.optimizer)) if is_divided else ""
    main = MAIN.format(
        optimizer="" if is_divided else MADE_BEFORE.format("\n    ".join(parts.optimizer)),
        given="" if is_divided else ", optimizers=(optimizer, None)",
        fsdp=FSDP.format(config.sharding is not Sharding.ZERO2) if is_divided else "",
        divisor="(NUM_RANKS * ACCUMULATION_STEPS)" if is_sharded else "ACCUMULATION_STEPS",
        report="report(trainer.losses)" if is_sharded else REPORT,
        cpu=device.type == "cpu",
        is_mixed=config.precision is Precision.BF16_MIXED,
        norm=norm,
    )
    found = Loop(
        title="the Trainer of transformers",
        imports=[
            *parts.imports,
            "from torch.utils.data import DataLoader",
            "from transformers import Trainer, TrainingArguments",
        ],
        functions=[
            *parts.functions,
            *[REPORT_RANKS] * is_sharded,
            *[CLASSES] * is_divided,
            TRAINER.format() + create,
            AS_IT_IS,
            main,
        ],
        calls=parts.calls,
        settings=(f"ACCUMULATION_STEPS = {config.accumulation_steps}  # micro-batches",),
        needs="transformers and accelerate: pip install transformers accelerate",
    )
    return of_ranks(found, config) if is_sharded else found
