"""The models that predictions are compared on: the zoo's small ones, libraries' own, and ours.

Random weights and inputs, sizes for two cores. All are larger than their Python objects and smaller
than a second a step; what they are together is one of each kind of layer that is common in use.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memlab
from benchmarks import meter
from memlab import Workload

CLASSES, LENGTH, VOCABULARY = 10, 48, 512


class TiedAutoencoder(nn.Module):
    """An embedding, an MLP, and the embedding again as the decoder: tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.hidden = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
        self.decoder = nn.Linear(128, VOCABULARY, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of every token, (n, length, vocabulary)."""
        logits: torch.Tensor = self.decoder(self.hidden(self.embedding(tokens)))
        return logits


class GruClassifier(nn.Module):
    """A two-layer bidirectional GRU with dropout, and a decoder of every state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 96)
        self.gru = nn.GRU(96, 96, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.decoder = nn.Linear(192, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of every token, (n, length, vocabulary)."""
        logits: torch.Tensor = self.decoder(self.gru(self.embedding(tokens))[0])
        return logits


def depthwise() -> nn.Module:
    """Return inverted residuals as in MobileNetV2 (Sandler et al. 2018), without the shortcuts."""

    def block(width: int, out: int, stride: int) -> nn.Sequential:
        inner = 4 * width
        return nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    blocks = nn.Sequential(block(16, 24, 2), block(24, 24, 1), block(24, 32, 2), block(32, 32, 1))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)


def encoder() -> nn.Module:
    """Return PyTorch's own transformer encoder with dropout, over vectors."""
    layer = nn.TransformerEncoderLayer(96, 4, 256, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(96, VOCABULARY))


def transformers_model(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what builds a model of transformers by config, such as "Bert", "ForMaskedLM"."""

    def build() -> nn.Module:
        import transformers

        name, _, head = kind.partition(" ")
        config = getattr(transformers, f"{name}Config")(**sizes)
        model: nn.Module = getattr(transformers, name + head)(config)
        return model

    return build


def tokens_to_tokens(name: str, build: Callable[[], nn.Module]) -> Workload:
    """Return a workload in which a module gives logits for each of its input tokens."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return Workload(
        name=name,
        build_model=build,
        make_batch=lambda n: torch.randint(VOCABULARY, (n, LENGTH)),
        compute_loss=loss,
    )


def labelled_tokens(name: str, build: Callable[[], nn.Module]) -> Workload:
    """Return a workload of a model of transformers that computes its loss itself."""
    return Workload(
        name=name,
        build_model=build,
        make_batch=lambda n: torch.randint(VOCABULARY, (n, LENGTH)),
        compute_loss=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
    )


def images(name: str, build: Callable[[], nn.Module], size: int = 32) -> Workload:
    """Return classification of random colour images."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return nn.functional.cross_entropy(logits, batch[1])

    return Workload(
        name=name,
        build_model=build,
        make_batch=lambda n: (torch.randn(n, 3, size, size), torch.randint(2, (n,))),
        compute_loss=loss,
    )


def vectors() -> Workload:
    """Return the transformer encoder over random vectors."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Workload(
        name="encoder",
        build_model=encoder,
        make_batch=lambda n: (
            torch.randn(n, LENGTH, 96),
            torch.randint(VOCABULARY, (n, LENGTH)),
        ),
        compute_loss=loss,
    )


BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 96,
    "d_kv": 24,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt-small": lambda: memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64),
    "resnet-digits": lambda: memlab.workloads.get("resnet-digits"),
    "vit-digits": lambda: memlab.workloads.get("vit-digits", num_layers=3),
    "lstm-text": lambda: memlab.workloads.get("lstm-text", sequence_length=48),
    "llama": meter.llama,
    "densenet121": meter.WORKLOADS["densenet121"],
    "unet-3d": meter.WORKLOADS["unet-3d"],
    "vnet": lambda: meter.monai("vnet", "VNet", (1, 32, 32, 16)),
    "bert": lambda: labelled_tokens("bert", transformers_model("Bert ForMaskedLM", **BERT)),
    "t5": lambda: labelled_tokens("t5", transformers_model("T5 ForConditionalGeneration", **T5)),
    "encoder": vectors,
    "depthwise": lambda: images("depthwise", depthwise),
    "convnext": lambda: images(
        "convnext",
        transformers_model(
            "ConvNext ForImageClassification", hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 2, 1]
        ),
        64,
    ),
    "swin": lambda: images("swin", transformers_model("Swin ForImageClassification", **SWIN)),
    "gru": lambda: tokens_to_tokens("gru", GruClassifier),
    "tied": lambda: tokens_to_tokens("tied", TiedAutoencoder),
    "mlp": meter.mlp,
}
