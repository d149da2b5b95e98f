"""What plain PyTorch does with one of the wild models: the reference, which uses no memlab.

Run in a process of its own. It finds the first recipe that trains, counts parameters, and runs
three AdamW updates twice; each is told by its loss and by a digest of all weights and buffers. If
the two runs differ in a bit, the model is random in itself and is compared no further.
"""

import contextlib
import hashlib
import itertools
import json
import sys
import traceback
from typing import Any

import torch
from torch import nn

from benchmarks.wild_models import nth_recipe
from benchmarks.wild_models.recipe import Recipe

SEED, NUM_UPDATES, LEARNING_RATE = 0, 3, 1e-3
BATCH_SIZE = 2
MOST_PARAMETERS = 12_000_000


def updates(found: Recipe) -> list[tuple[str, str]]:
    """Return the loss and the digest of the state after each of three updates."""
    torch.manual_seed(SEED)
    model = found.build()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(SEED)
    batch = found.batch(BATCH_SIZE)

    done = []
    for index in range(NUM_UPDATES):
        torch.manual_seed(SEED + index)
        loss = found.loss(model, batch)
        value = loss.item()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done.append((value.hex(), digest(model)))
    return done


def digest(model: nn.Module) -> str:
    """Return a hash of every bit of a model's weights and buffers."""
    found = hashlib.sha256()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def num_parameters(found: Recipe) -> int:
    """Return how many numbers are in the weights, without making them where that works."""
    with contextlib.suppress(Exception), torch.device("meta"):
        return sum(p.numel() for p in found.build().parameters())
    return sum(p.numel() for p in found.build().parameters())


def sizes(package: str, names: list[str]) -> dict[str, int]:
    """Return how many numbers are in the weights of the models that are known by their shapes.

    One process asks this of many models, of which most of some registries are too large.
    """
    found: dict[str, int] = {}
    for name in names:
        with contextlib.suppress(Exception), torch.device("meta"):
            model = nth_recipe(package, name, 0).build()
            found[name] = sum(p.numel() for p in model.parameters())
    return found


def reference(package: str, name: str) -> dict[str, Any]:
    """Return what plain PyTorch says of a model: its updates, or why there are none."""
    said = "it has no recipe"
    try:
        for variant in itertools.count():
            found = nth_recipe(package, name, variant)
            try:
                size = num_parameters(found)
                if size > MOST_PARAMETERS:
                    said = too_many(size)
                    continue
                first = updates(found)
            except Exception as error:
                said = one_line(error)
                continue
            again = updates(nth_recipe(package, name, variant))
            return {
                "plain": "trains",
                "variant": variant,
                "parameters": size,
                "updates": first,
                "repeats": first == again,
            }
    except IndexError:
        pass  # the last way has been tried
    except Exception as error:
        said = one_line(error)
    is_large = said.endswith("too many for this benchmark")
    return {"plain": "too large" if is_large else "fails", "why": said}


def too_many(size: int) -> str:
    """Return why a model of so many parameters is left out."""
    return f"{size} parameters are too many for this benchmark"


def one_line(error: BaseException) -> str:
    """Return the last line of a traceback and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{where}"


def main() -> None:
    """Print what is found for the package and the name on the command line."""
    package, name = sys.argv[1:]
    print(json.dumps(reference(package, name)))
