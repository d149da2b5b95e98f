"""Image classifiers on hand-written digits, scaled up: ResNet and ViT from transformers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab._util.torch_private.tensors import Dropout
from memlab.errors import WorkloadError
from memlab.workload import Workload
from memlab.workloads.data import digit_masks_batch, digits_batch, zoo_import


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNet:
    """Sizes of a ResNet; it has BatchNorm, so a smaller micro-batch changes its gradient.

    Above 1, `segment_length` puts so many blocks of a stage into one module: what is recomputed
    is a module, and a deep network holds least in about as many segments as a segment has blocks.
    """

    image_size: int = 64
    num_channels: int = 1
    embedding_size: int = 32
    hidden_sizes: tuple[int, ...] = (32, 64, 128, 256)
    depths: tuple[int, ...] = (2, 2, 2, 2)
    layer_type: str = "basic"
    segment_length: int = 1
    num_labels: int = 10
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.segment_length < 1:
            raise WorkloadError(
                f"segment_length={self.segment_length}; allowed is an int of at least 1, how "
                "many blocks stand in one module and can be recomputed together"
            )

    def build(self) -> nn.Module:
        """Return transformers' ResNet of these sizes, with dropout before its classifier."""
        transformers = zoo_import("transformers")
        model = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                num_channels=self.num_channels,
                embedding_size=self.embedding_size,
                hidden_sizes=list(self.hidden_sizes),
                depths=list(self.depths),
                layer_type=self.layer_type,
                num_labels=self.num_labels,
            )
        )
        if self.dropout > 0:
            model.classifier.insert(1, nn.Dropout(self.dropout))  # after Flatten
        if self.segment_length > 1:
            for stage in model.resnet.encoder.stages:
                stage.layers = _in_segments(stage.layers, self.segment_length)

        classifier: nn.Module = model
        return classifier

    def workload(self, name: str) -> Workload:
        """Return digit classification with this model."""
        return _classification(self, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViT:
    """Sizes of a vision transformer."""

    image_size: int = 32
    patch_size: int = 4
    num_channels: int = 1
    hidden_size: int = 192
    num_layers: int = 6
    num_heads: int = 6
    num_labels: int = 10
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return transformers' ViT of these sizes, randomly initialised."""
        transformers = zoo_import("transformers")
        model: nn.Module = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=self.image_size,
                patch_size=self.patch_size,
                num_channels=self.num_channels,
                hidden_size=self.hidden_size,
                intermediate_size=4 * self.hidden_size,
                num_hidden_layers=self.num_layers,
                num_attention_heads=self.num_heads,
                hidden_dropout_prob=self.dropout,
                attention_probs_dropout_prob=self.dropout,
                num_labels=self.num_labels,
            )
        )

        return model

    def workload(self, name: str) -> Workload:
        """Return digit classification with this model."""
        return _classification(self, name)


def _classification(spec: ResNet | ViT, name: str) -> Workload:
    return Workload(
        name=name,
        build_model=spec.build,
        make_batch=partial(
            digits_batch, image_size=spec.image_size, num_channels=spec.num_channels
        ),
        compute_loss=_loss,
    )


def _in_segments(layers: nn.Sequential, length: int) -> nn.Sequential:
    """Return the same layers in modules of some each."""
    starts = range(0, len(layers), length)
    return nn.Sequential(*(layers[start : start + length] for start in starts))


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    pixels, labels = batch
    return nn.functional.cross_entropy(model(pixel_values=pixels).logits, labels)


# Models from MONAI on hand-written digits: a DenseNet classifies them, a VNet segments them.
#
# The number of sizes decides whether the images are flat or volumes. A digit becomes a
# volume by being repeated along the depth. Medical data is not used: its licences forbid
# shipping it.

NUM_CLASSES = 2  # digit and background


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseNet:
    """Sizes of a DenseNet; it has BatchNorm, so a smaller micro-batch changes its gradient."""

    image_size: int = 32
    num_channels: int = 1
    embedding_size: int = 16
    growth_rate: int = 8
    depths: tuple[int, ...] = (3, 6, 6, 4)
    num_labels: int = 10
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """Return MONAI's DenseNet of these sizes, randomly initialised."""
        model: nn.Module = zoo_import("monai.networks.nets").DenseNet(
            spatial_dims=2,
            in_channels=self.num_channels,
            out_channels=self.num_labels,
            init_features=self.embedding_size,
            growth_rate=self.growth_rate,
            block_config=self.depths,
            dropout_prob=self.dropout,
        )
        return model

    def workload(self, name: str) -> Workload:
        """Return digit classification with this model."""
        return Workload(
            name=name,
            build_model=self.build,
            make_batch=partial(
                digits_batch, image_size=self.image_size, num_channels=self.num_channels
            ),
            compute_loss=_loss_volumes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VNet:
    """Sizes of what a VNet segments; the widths of MONAI's are fixed, at 45 million parameters."""

    volume_size: tuple[int, ...] = (32, 32, 32)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        size = self.volume_size
        if len(size) not in (2, 3) or any(n < 16 or n % 16 for n in size):
            raise WorkloadError(
                f"volume_size={size}; allowed are two or three multiples of 16, since a VNet "
                "halves them four times, such as (64, 64, 32)"
            )

    def build(self) -> nn.Module:
        """Return MONAI's VNet for volumes or images, randomly initialised."""
        model: nn.Module = zoo_import("monai.networks.nets").VNet(
            spatial_dims=len(self.volume_size),
            out_channels=NUM_CLASSES,
            dropout_prob_down=self.dropout,
            dropout_prob_up=(self.dropout, self.dropout),
            dropout_dim=len(self.volume_size),
        )
        for part in model.modules():
            if isinstance(part, Dropout):  # MONAI leaves 0.5 on two of its skip connections
                part.p = self.dropout

        return model

    def workload(self, name: str) -> Workload:
        """Return the segmentation of digits from their background with this model."""
        return Workload(
            name=name,
            build_model=self.build,
            make_batch=partial(digit_masks_batch, size=self.volume_size),
            compute_loss=_loss_volumes,
        )


def _loss_volumes(model: nn.Module, batch: Any) -> torch.Tensor:
    images, targets = batch  # a class for each image, or for each of its voxels
    return nn.functional.cross_entropy(model(images), targets)
