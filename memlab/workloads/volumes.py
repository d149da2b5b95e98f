"""Models from MONAI on hand-written digits: a DenseNet classifies them, a VNet segments them.

The number of sizes decides whether the images are flat or volumes. A digit becomes a volume by
being repeated along the depth. Medical data is not used: its licences forbid shipping it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.errors import WorkloadError
from memlab.torch_private.modules import Dropout
from memlab.workload import Workload
from memlab.workloads.data import digit_masks_batch, digits_batch, zoo_import

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
            compute_loss=_loss,
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
            compute_loss=_loss,
        )


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, targets = batch  # a class for each image, or for each of its voxels
    return nn.functional.cross_entropy(model(images), targets)
