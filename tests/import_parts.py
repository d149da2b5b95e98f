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


def needs_trl() -> Any:
    """Return trl; skip where it, or peft, whose adapters its trainers are given, is missing."""
    needs_trainer()
    pytest.importorskip("peft", reason="needs memlab[finetune]")
    return pytest.importorskip("trl", reason="needs trl")


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


def words_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the words w0, w1 and so on. Nothing is downloaded."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    ids = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return needs_trainer().PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sentences(num: int = 8, length: int = 6) -> Any:
    """Return a data set of texts of 1 to 5 lengths, from `length` words on."""
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({
        "text": [_sentence(7 * i, length + i % 5) for i in range(num)]
    })  # fmt: skip


def preferences(num: int = 8) -> Any:
    """Return a data set of prompts, each with an answer that was chosen and one that was not."""
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({
        "prompt": [_sentence(7 * i, 3 + i % 2) for i in range(num)],
        "chosen": [f" {_sentence(3 * i, 3 + i % 4)}" for i in range(num)],
        "rejected": [f" {_sentence(5 * i, 2 + i % 5)}" for i in range(num)],
    })  # fmt: skip


def _sentence(first: int, length: int) -> str:
    return " ".join(f"w{(first + i) % (VOCABULARY - 3)}" for i in range(length))


def trl_trainer_of(tmp_path: Any, model: torch.nn.Module, kind: str, **settings: Any) -> Any:
    """Return trl's trainer of this name on the CPU, with LoRA on all linear layers.

    `peft_config`, `train_dataset` and `of_class`, a subclass, are arguments of their own.
    """
    trl = needs_trl()
    import peft

    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
    data = settings.pop("train_dataset", None) or (
        preferences() if kind == "DPOTrainer" else sentences()
    )  # fmt: skip
    made = settings.pop("of_class", None) or getattr(trl, kind)
    parts = {"peft_config": settings.pop("peft_config", lora)}
    given = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 4, "max_grad_norm": 0.0, "max_length": 16, "bf16": False,
    } | settings  # fmt: skip
    arguments = getattr(trl, kind.replace("Trainer", "Config"))(**given)
    return made(model=model, args=arguments, train_dataset=data,
                processing_class=words_tokenizer(), **parts)  # fmt: skip


def first_update(trainer: Any) -> SimpleNamespace:
    """Run a transformers Trainer for one update; return its loss and its gradients by name."""
    transformers = needs_trainer()
    found = SimpleNamespace(gradients={}, loss=None)

    class Note(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            for name, parameter in parts["model"].named_parameters():
                if parameter.grad is not None:
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
