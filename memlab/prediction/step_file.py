"""A recorded step as one small file, from which a page computes what `BatchSizeModel` computes.

`packed` writes it, and `packed_result` the same for one result with its timeline; `result_in` reads
the result of both, `_panel/page/step_file.js` all. The file is gzip over three parts:

    4 bytes     length of the header, little-endian
    header      JSON: names, settings, uncertainties, plans of memory budgets, list of the arrays
    arrays      one after the other, little-endian, each padded to 8 bytes

Rows of blocks that take nothing for any batch size are left out, which is most of them: each
operator may have a workspace, and few do. The rest is numbered anew.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memlab._version import __version__
from memlab.config import Sharding, StepConfig
from memlab.errors import ConfigError, MemlabError
from memlab.prediction.batch_size_model import BatchSizeModel
from memlab.prediction.interpolation import can_replan
from memlab.result import StepResult
from memlab.techniques import registry
from memlab.techniques.checkpointing import checkpointing
from memlab.trace import CATEGORIES
from memlab.tracing.program import MOST_RECORDED

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

    from memlab.prediction.budget_frontier import BudgetFrontier
    from memlab.prediction.predict import Prediction

FORMAT, OF_RESULT, VERSION = "memlab step", "memlab result", 1
ALIGNMENT = 8
MOST_BYTES = 2**28  # of what a file unpacks to
DAMAGES = (OSError, EOFError, LookupError, MemlabError, RecursionError, TypeError, ValueError,
           zlib.error)  # fmt: skip


def packed(
    prediction: Prediction,
    frontier: BudgetFrontier | None = None,
    planned: StepConfig | None = None,
) -> bytes:
    """Return the file of a prediction that has a size model.

    Args:
        prediction: of the step.
        frontier: the plans of its memory budgets; None if they are not known.
        planned: the config that they were made for.
    """
    model, result = prediction.size_model, prediction.result
    assert model is not None
    program = model.program
    arrays, numbers = _arrays(model)
    names = list(dict.fromkeys(program.ran.names))
    index = {name: at for at, name in enumerate(names)}
    arrays["operator_name"] = np.array([index[name] for name in program.ran.names], np.int32)
    arrays["operator_module"] = program.ran.module.astype(np.int32)
    recording = program.recording

    header = {
        "data_parallel_size": result.config.data_parallel_size,
        "sizes": list(program.sizes),
        "other_size": program.other_size,
        "differs": program.differs,
        "estimates": _estimates(result.config, "cpu" if model.settings is None else "cuda"),
        "most_recorded": MOST_RECORDED,
        "intervals": [[i.step, str(i.phase), i.micro_batch] for i in recording.intervals],
        "operator_ends": [end for _, end in program.operator_slices()],
        "interval_seconds": None if model.seconds is None else [
            [value for line in model.lines(at) for value in line]
            for at in range(len(model.seconds))
        ],
        "modules": sorted(recording.modules, key=recording.modules.__getitem__),
        "operators": names,
        "parameters": _renumbered(recording.parameters, numbers),
        "states": _renumbered(recording.states, numbers),
        "allocator": None if model.settings is None else {
            "expandable_segments": model.settings.expandable_segments
        },
        "plans": None if frontier is None or planned is None else _plans(frontier, planned),
    }  # fmt: skip
    return _file(FORMAT, result, header, arrays)


def packed_result(result: StepResult) -> bytes:
    """Return the file of one result: what it says, and its timeline by category.

    Of bytes it holds the changes from instant to instant, which are mostly zero.
    """
    timeline, arrays = result.timeline, {}
    if timeline is not None and len(timeline):
        changes = np.diff(timeline.bytes_by_category, axis=0, prepend=0).astype(np.float64)
        arrays = dict(zip(map(str, CATEGORIES), changes.T, strict=True))
        arrays |= {"phase": timeline.phase.astype(np.uint8)}
        arrays |= {name: getattr(timeline, name) for name in ("micro_batch", "operator")}
    return _file(OF_RESULT, result, {}, arrays)


def result_in(file: bytes) -> StepResult:
    """Return the result in a file of `packed` or `packed_result`; only the latter has a timeline.

    Raises:
        ConfigError: it is no such file, damaged, or of a newer version.
    """
    try:
        data = gzip.GzipFile(fileobj=io.BytesIO(file)).read(MOST_BYTES + 1)
        end = 4 + int.from_bytes(data[:4], "little")
        header = json.loads(data[4:end])
        is_ours = header["format"] in (FORMAT, OF_RESULT) and len(data) <= MOST_BYTES
        is_newer = is_ours and header["version"] > VERSION
        if is_ours and not is_newer:
            timeline = _timeline(header, data) if header["format"] == OF_RESULT else None
            return StepResult.from_dict({**header["result"], "timeline": timeline})
    except DAMAGES as error:
        raise ConfigError(f"holds a step that is damaged ({type(error).__name__})") from error
    if is_newer:
        raise ConfigError("was written by a newer memlab: update memlab to open it")
    raise ConfigError("holds something else than a step that memlab wrote")


def _timeline(header: dict[str, Any], data: bytes) -> dict[str, Any] | None:
    """Return the timeline of a result as `Timeline.from_dict` takes it; None if it has none."""
    arrays = {}
    at = 4 + int.from_bytes(data[:4], "little")
    for name, kind, count in header["arrays"]:
        at += -at % ALIGNMENT
        arrays[name] = np.frombuffer(data, kind, count, at)
        at += arrays[name].nbytes
    if not arrays:
        return None
    changes = np.stack([arrays[str(category)] for category in CATEGORIES], axis=1)
    columns = {name: arrays[name] for name in ("phase", "micro_batch", "operator")}
    return {"bytes_by_category": changes.astype(np.int64).cumsum(axis=0), **columns}


def _file(
    form: str, result: StepResult, more: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]
) -> bytes:
    """Return the file of a result, with more in its header, and arrays."""
    header = {
        "format": form,
        "version": VERSION,
        "memlab": __version__,
        "result": replace(result, timeline=None, ranks=(), printed="").to_dict(),
        **more,
        "arrays": [[name, str(values.dtype), len(values)] for name, values in arrays.items()],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(4, "little"), text]
    parts.append(bytes(-(len(text) + 4) % ALIGNMENT))
    for values in arrays.values():
        data = values.tobytes()
        parts += [data, bytes(-len(data) % ALIGNMENT)]
    return gzip.compress(b"".join(parts), mtime=0)


def _arrays(model: BatchSizeModel) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
    """Return the columns of rows and blocks, and the new number of each block, -1 for none."""
    program = model.program
    layout = program.layout
    at_size, at_other = program.sizes_over_batch(model.own)
    least, least_other = program.sizes_over_batch(model.least)
    is_held = (at_size != 0) | (at_other != 0)
    numbers = np.where(is_held, np.cumsum(is_held) - 1, -1)
    rows = is_held[layout.block]
    births = np.zeros(len(is_held), np.int64)
    births[layout.block[layout.is_birth]] = layout.interval[layout.is_birth]
    count = int(layout.block.max()) + 1
    successor = np.full(len(is_held), -1, np.int64)
    if program.num_recorded == MOST_RECORDED and not program.differs:
        successor[:count] = program.successors(count)
    next_number = np.where(successor >= 0, numbers[successor], -1)

    arrays: dict[str, npt.NDArray[Any]] = {
        "row_block": np.where(layout.is_birth, numbers[layout.block], ~numbers[layout.block])[rows],
        "row_interval": layout.interval[rows],
        "row_operator": layout.operator[rows],
        "row_module": layout.module[rows],
    }
    if layout.stream is not None:
        arrays["row_stream"] = layout.stream[rows]
    arrays |= {
        "block_interval": births[is_held],
        "block_successor": next_number[is_held],
    }
    arrays = {name: values.astype(np.int32) for name, values in arrays.items()}
    arrays["row_category"] = model.columns[rows].astype(np.uint8)
    sizes = {"block_bytes": at_size, "block_other_bytes": at_other}
    sizes |= {"block_least_bytes": least, "block_least_other_bytes": least_other}
    return arrays | {n: v[is_held].astype(np.float64) for n, v in sizes.items()}, numbers


def _plans(frontier: BudgetFrontier, planned: StepConfig) -> dict[str, Any]:
    return {
        "micro_batch_size": planned.micro_batch_size,
        "accumulation_steps": planned.accumulation_steps,
        "plans": [
            {
                "share": plan.share,
                "saved_bytes": plan.saved_bytes,
                "peak_bytes": plan.peak_bytes,
                "recompute_seconds": plan.recompute_seconds,
                "note": checkpointing.notes_of_plan(planned, plan)[0],
            }
            for plan in frontier.plans
        ],
    }


def _estimates(config: StepConfig, kind: str) -> dict[str, bool]:
    """Return whether steps of other micro-batches, and of other budgets, may be estimated."""
    budgets = {config.memory_budget, 1.0, 0.5}
    if config.sharding is not Sharding.NONE:
        return {"accumulation": False, "budget": False}
    divided = replace(config, batch_size=2, accumulation_steps=2)
    accumulates = not registry.is_refused(divided, kind)
    of = divided if accumulates else config
    replans = all(can_replan(replace(of, memory_budget=budget), kind) for budget in budgets)
    return {"accumulation": accumulates, "budget": replans}


def _renumbered(paths: dict[int, str], numbers: npt.NDArray[np.int64]) -> dict[str, str]:
    return {str(numbers[block]): path for block, path in paths.items() if numbers[block] >= 0}
