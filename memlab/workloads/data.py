"""Real data that ships in a package: English text in Python itself, digits in scikit-learn.

The data is cached as NumPy arrays. These are outside of PyTorch's allocator, so the cache does not
count as memory of a step. The batches are copied into tensors and do count.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from memlab.errors import WorkloadError

if TYPE_CHECKING:
    import numpy.typing as npt  # imported for types only, because it takes 5 ms

INK = 0.5  # above which a pixel, from 0 to 1, counts as digit


@functools.cache
def _text() -> npt.NDArray[np.uint8]:
    from pydoc_data.topics import topics  # Python's own reference, about 0.5 MB of English

    return np.frombuffer("\n".join(topics.values()).encode(), np.uint8)


def num_text_bytes() -> int:
    """Return how long the text is of which `text_batch` takes windows."""
    return len(_text())


@functools.cache
def digits_images() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return 1797 hand-written digits, (1797, 8, 8) from 0 to 1, and their labels."""
    bunch = zoo_import("sklearn.datasets").load_digits()
    return (bunch.images / 16).astype(np.float32), bunch.target.astype(np.int64)


def text_batch(n: int, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n windows of text as bytes and the byte that follows each, both (n, length) int64."""
    text = _text()
    starts = torch.randint(len(text) - sequence_length - 1, (n,)).numpy()
    windows = text[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int64)
    return torch.tensor(windows[:, :-1]), torch.tensor(windows[:, 1:])


def digits_batch(n: int, image_size: int, num_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n digits scaled up, (n, channels, size, size) float32, and labels, (n,) int64."""
    images, labels = digits_images()
    chosen = torch.randint(len(labels), (n,)).numpy()
    pixels = torch.tensor(images[chosen])[:, None]  # (n, 1, 8, 8)
    pixels = torch.nn.functional.interpolate(pixels, size=(image_size, image_size), mode="bilinear")
    return pixels.repeat(1, num_channels, 1, 1), torch.tensor(labels[chosen])


def digit_masks_batch(n: int, size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n digits as images or volumes, and a mask of the voxels that belong to a digit.

    Args:
        n: samples.
        size: (height, width), or (depth, height, width): the middle half of the depth has the
            digit, the rest is empty.

    Returns:
        float32, (n, 1, *size), from 0 to 1, and int64, (n, *size), 1 where a digit is.
    """
    height, width = size[-2:]
    images, _ = digits_images()
    pixels = torch.tensor(images[torch.randint(len(images), (n,)).numpy()])[:, None]
    pixels = torch.nn.functional.interpolate(pixels, size=(height, width), mode="bilinear")

    if len(size) == 3:
        depth = size[0]
        is_inside = (torch.arange(depth) - (depth - 1) / 2).abs() < depth / 4
        pixels = pixels[:, :, None] * is_inside[:, None, None]  # (n, 1, depth, height, width)

    return pixels, (pixels[:, 0] > INK).long()


def zoo_import(module: str, extra: str = "zoo") -> Any:
    """Import a module of the zoo extra, or of another one.

    Raises:
        WorkloadError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"this workload needs {str(error.name).partition('.')[0]}, which is not installed; "
            f"run: pip install 'memlab[{extra}]'"
        ) from error


# Digits as JPEG files: a dataset whose samples have to be decoded.
#
# Pillow makes the files from the digits that ship with scikit-learn. They are kept in
# memory, so that no time of a disk is measured. Left out: augmentation.


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
