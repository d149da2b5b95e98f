"""Digits as JPEG files: a dataset whose samples have to be decoded.

Pillow makes the files from the digits that ship with scikit-learn. They are kept in memory, so
that no time of a disk is measured. Left out: augmentation.
"""

import io
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memlab.workloads.data import digits_images


class JpegDigits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Hand-written digits as JPEG files; a sample is decoded, scaled down and made a tensor.

    Args:
        image_size: of a sample, (channels, image_size, image_size) float32 from 0 to 1.
        num_channels: 1 or 3.
        file_size: pixels a side of the files, as photographs are larger than what is trained on.
        num_files: that there are.

    >>> pixels, label = JpegDigits(image_size=16, num_files=2)[0]
    >>> pixels.shape, pixels.dtype
    (torch.Size([1, 16, 16]), torch.float32)
    """

    def __init__(
        self,
        image_size: int = 32,
        *,
        num_channels: int = 1,
        file_size: int = 256,
        num_files: int = 256,
    ) -> None:
        from PIL import Image  # late: it comes with matplotlib, which core memlab does not import

        images, labels = digits_images()
        self.image_size, self.mode = image_size, "L" if num_channels == 1 else "RGB"
        self.labels = torch.from_numpy(labels[:num_files].copy())
        self.files = []

        for pixels in images[:num_files]:
            picture = Image.fromarray((255 * pixels).astype(np.uint8))
            file = io.BytesIO()
            picture.resize((file_size, file_size)).convert(self.mode).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        from PIL import Image  # as above

        picture: Any = Image.open(io.BytesIO(self.files[index]))
        picture = picture.resize((self.image_size, self.image_size))
        pixels = np.atleast_3d(np.asarray(picture, np.float32) / 255)  # (height, width, channels)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), self.labels[index]
