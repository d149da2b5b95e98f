"""Small trainers of real libraries for the tests of importing, and their own first update."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

LENGTH, VOCABULARY = 12, 50


def needs_trainer() -> Any:
    """Return transformers; skip where it or accelerate, which its Trainer needs, is missing."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    return pytest.importorskip("transformers", reason="needs memlab[zoo]")


def needs_lightning() -> Any:
    """Return lightning.pytorch; skip where it is not installed."""
    return pytest.importorskip("lightning.pytorch", reason="needs lightning")


def texts(num: int = 8, *, is_ragged: bool = False) -> list[dict[str, Any]]:
    """Return samples of a language model; ragged ones have labels that are ignored."""
    drawn = torch.Generator().manual_seed(0)
    samples = []
    for i in range(num):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=drawn)
        labels = ids.clone()
        if is_ragged:
            labels[: i % 5] = -100
        samples.append({"input_ids": ids, "labels": labels, "unused": i})
    return samples


def tiny(kind: str, transformers: Any) -> torch.nn.Module:
    """Return a model of two blocks without dropout, from a config."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2, "intermediate_size": 32}  # fmt: skip
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ))  # fmt: skip
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=2)
        )
    made = transformers.BertConfig(
        **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3
    )
    model = {"bert": "BertForMaskedLM", "classifier": "BertForSequenceClassification"}[kind]
    return getattr(transformers, model)(made)


def trainer_of(tmp_path: Any, model: torch.nn.Module, samples: Any, **settings: Any) -> Any:
    """Return a transformers Trainer on the CPU that saves and reports nothing."""
    transformers = needs_trainer()
    given = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 4, "max_grad_norm": 0.0,
    } | settings  # fmt: skip
    parts = {name: given.pop(name) for name in ("compute_loss_func", "optimizers", "data_collator")
             if name in given}  # fmt: skip
    kind = given.pop("kind", transformers.Trainer)
    arguments = transformers.TrainingArguments(**given)
    return kind(model=model, args=arguments, train_dataset=samples, **parts)


def first_update(trainer: Any) -> SimpleNamespace:
    """Run a transformers Trainer for one update; return its loss and its gradients by name."""
    transformers = needs_trainer()
    found = SimpleNamespace(gradients={}, loss=None)

    class Note(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            for name, parameter in parts["model"].named_parameters():
                found.gradients[name] = parameter.grad.clone()

    trainer.add_callback(Note())
    found.loss = trainer.train().training_loss
    return found


def worst_error(gradients: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of gradients, relative to all of the first."""
    assert gradients.keys() == others.keys()
    assert gradients
    total = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    return max(float((g - others[name]).norm() / total) for name, g in gradients.items())
