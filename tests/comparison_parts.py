"""Predicted runs by hand, and the same runs as a snapshot would show them."""

import dataclasses

import numpy as np

from memlab._util.units import MIB
from memlab.trace import Interval, Phase, Trace
from tests.snapshot_parts import (
    ADAM,
    BACKWARD,
    BASE,
    BUILD,
    FORWARD,
    SCRIPT,
    UPDATE,
    ZERO_GRAD,
    frames,
)

DATA = frames(
    "/usr/lib/python3/site-packages/torch/utils/data/_utils/pin_memory.py:3 pin",
    SCRIPT[0]["filename"] + ":22 train",
)
STACKS = {Phase.BUILD: BUILD, Phase.DATA: DATA, Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD,
          Phase.OPTIMIZER: UPDATE}  # fmt: skip


@dataclasses.dataclass
class Event:
    """One allocation or free: `block` is its name, `nbytes` is None for a free."""

    block: str
    nbytes: int | None
    step: int
    phase: Phase
    operator: str = ""
    module: str = ""


def story(num_layers=3, num_steps=3):
    """Return the events of a run of `num_layers` layers, each with sizes of its own."""
    found = []

    def born(name, nbytes, step, phase, operator="", module=""):
        found.append(Event(name, nbytes, step, phase, operator, module))

    def freed(name, step, phase):
        found.append(Event(name, None, step, phase))

    layers = range(num_layers)
    for k in layers:
        born(f"weight {k}", (k + 1) * MIB, -1, Phase.BUILD, "aten::empty", f"layers.{k}")
    for step in range(num_steps):
        born(f"x {step}", 3 * MIB, step, Phase.DATA)
        for k in layers:
            born(f"y {k} {step}", (2 * k + 4) * MIB, step, Phase.FORWARD, "aten::mm",
                 f"layers.{k}")  # fmt: skip
            born(f"t {k} {step}", MIB // 2, step, Phase.FORWARD, "aten::gelu", f"layers.{k}")
            freed(f"t {k} {step}", step, Phase.FORWARD)
        for k in reversed(layers):
            born(f"g {k} {step}", (k + 1) * MIB, step, Phase.BACKWARD, "aten::mm", f"layers.{k}")
            born(f"w {k} {step}", 6 * MIB, step, Phase.BACKWARD, "aten::convolution_backward",
                 f"layers.{k}")  # fmt: skip
            freed(f"w {k} {step}", step, Phase.BACKWARD)
            freed(f"y {k} {step}", step, Phase.BACKWARD)
        for k in layers:
            if step == 0:
                born(f"m {k}", (k + 1) * MIB, step, Phase.OPTIMIZER, "aten::zeros_like")
        born(f"u {step}", 5000, step, Phase.OPTIMIZER, "aten::_foreach_mul")
        freed(f"u {step}", step, Phase.OPTIMIZER)
        for k in layers:
            freed(f"g {k} {step}", step, Phase.OPTIMIZER)
        freed(f"x {step}", step, Phase.OPTIMIZER)
    return found


def trace_of(events):
    """Return the trace that a prediction of these events would have."""
    numbers, sizes, intervals, modules, operators = {}, {}, [], [], []
    rows = []
    for event in events:
        interval = Interval(step=event.step, phase=event.phase)
        if not intervals or intervals[-1] != interval:
            intervals.append(interval)
        if event.module and event.module not in modules:
            modules.append(event.module)
        address = numbers.setdefault(event.block, len(numbers) + 1)
        if event.nbytes is not None:
            sizes[event.block] = event.nbytes
            operators.append(event.operator)
        nbytes = sizes[event.block] if event.nbytes is not None else -sizes[event.block]
        rows.append((address, nbytes, len(intervals) - 1, len(operators),
                     event.nbytes is not None and bool(event.operator),
                     modules.index(event.module) if event.module else -1))  # fmt: skip
    columns = np.array(rows, np.int64).T
    parameters = {number: name for name, number in numbers.items() if name.startswith("weight")}
    return Trace(
        address=columns[0],
        nbytes=columns[1],
        interval=columns[2].astype(np.int32),
        operator=columns[3].astype(np.int32),
        in_operator=columns[4].astype(bool),
        module=columns[5].astype(np.int32),
        intervals=tuple(intervals),
        operators=tuple(operators),
        modules=tuple(modules),
        parameters=parameters,
        leftover_bytes=0,
    )


def events_of(trace, last_step):
    """Return the events of a trace up to the end of a step, as a story."""
    found = []
    for number, (address, nbytes, interval) in enumerate(
        zip(trace.address.tolist(), trace.nbytes.tolist(), trace.interval.tolist(), strict=True)
    ):
        where = trace.intervals[interval]
        if where.step > last_step or where.phase is Phase.TEARDOWN:
            break
        place = trace.place(number)
        found.append(Event(str(address), nbytes if nbytes > 0 else None, where.step, where.phase,
                           place.operator, place.module))  # fmt: skip
    return found


def repeated(events, num_more):
    """Return a story whose last step is done so many times more."""
    last = max(event.step for event in events)
    body = [event for event in events if event.step == last]
    born = {event.block for event in body if event.nbytes is not None}
    found = list(events)
    for k in range(1, num_more + 1):
        found += [dataclasses.replace(e, step=last + k, block=f"{e.block} again {k}"
                                      if e.block in born else e.block) for e in body]  # fmt: skip
    return found


def snapshot_of(events, *, stacks=True, most_events=None, extra=None):
    """Return the snapshot that PyTorch would write of a story.

    Args:
        events: of the story.
        stacks: False leaves them out.
        most_events: only the newest ones are kept.
        extra: what to put into the events of an allocation, by the name of its block.
    """
    made, live, address, clock = [], {}, BASE, 1_700_000_000_000_000
    for event in events:
        clock += 10
        stack = STACKS[event.phase]
        if event.phase is Phase.OPTIMIZER and event.nbytes is None:
            stack = ZERO_GRAD
        if event.phase is Phase.OPTIMIZER and event.block.startswith("m "):
            stack = ADAM
        common = {"stream": 0, "time_us": clock, **({"frames": stack} if stacks else {})}
        if event.nbytes is not None:
            address += -(-event.nbytes // 512) * 512
            row = {"action": "alloc", "addr": address, "size": event.nbytes, **common}
            row |= (extra or {}).get(event.block, {})
            made.append(row)
            live[event.block] = row
        else:
            row = live.pop(event.block)
            for action in ("free_requested", "free_completed"):
                made.append({**common, "action": action, "addr": row["addr"], "size": row["size"]})
    blocks = [{"address": row["addr"], "size": -(-row["size"] // 512) * 512,
               "requested_size": row["size"], "state": "active_allocated",
               **({"frames": row["frames"]} if "frames" in row else {})}
              for row in sorted(live.values(), key=lambda row: row["addr"])]  # fmt: skip
    segment = {"device": 0, "address": BASE, "total_size": address - BASE + 2**30, "stream": 0,
               "segment_type": "large", "is_expandable": False, "blocks": blocks}  # fmt: skip
    kept = made if most_events is None else made[len(made) - most_events :]
    return {"segments": [segment], "device_traces": [kept]}
