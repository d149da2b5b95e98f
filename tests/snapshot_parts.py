"""Snapshot files, written as `torch.cuda.memory._dump_snapshot` writes them, from stories by hand.

The format is that of the docstring of `torch.cuda.memory._snapshot`: "segments" with blocks, and
"device_traces" with events whose size is the request, not rounded.
"""

import pickle

from memlab._util.units import MIB

BASE = 0x7F0000000000


def frames(*lines):
    """Return frames from lines such as "/home/me/train.py:12 main", the innermost first."""
    made = []
    for line in lines:
        place, _, name = line.partition(" ")
        filename, _, number = place.rpartition(":")
        made.append({"filename": filename, "line": int(number), "name": name})
    return made


MAIN = "/home/me/train.py:9 <module>"
TRAIN = "/home/me/train.py:24 train"
SITE = "/usr/lib/python3/site-packages"
CALL = f"{SITE}/torch/nn/modules/module.py:1773 _wrapped_call_impl"
BUILD = frames(f"{SITE}/torch/nn/modules/linear.py:106 __init__",
               "/home/me/model.py:5 __init__", MAIN)  # fmt: skip
FORWARD = frames(
    f"{SITE}/torch/nn/modules/linear.py:125 forward",
    CALL,
    "/home/me/model.py:12 forward",
    CALL,
    TRAIN,
    MAIN,
)
BACKWARD = []  # on the engine's thread there is no Python frame
CPP_BACKWARD = frames("??:0 at::native::mm", "??:0 torch::autograd::Engine::evaluate_function",
                      "??:0 torch::autograd::Engine::thread_main")  # fmt: skip
RECOMPUTE = frames(f"{SITE}/torch/nn/modules/linear.py:125 forward", CALL,
                   f"{SITE}/torch/utils/checkpoint.py:1110 unpack_hook")  # fmt: skip
ADAM = frames(
    f"{SITE}/torch/optim/adamw.py:130 _init_group",
    f"{SITE}/torch/optim/adamw.py:220 step",
    TRAIN,
    MAIN,
)
UPDATE = frames(
    f"{SITE}/torch/optim/adam.py:400 _multi_tensor_adam",
    f"{SITE}/torch/optim/adamw.py:243 step",
    TRAIN,
    MAIN,
)
ZERO_GRAD = frames(f"{SITE}/torch/optim/optimizer.py:960 zero_grad", "/home/me/train.py:25 train",
                   MAIN)  # fmt: skip
SCRIPT = frames("/home/me/train.py:22 train", MAIN)
KEPT = frames("/home/me/train.py:30 keep", "/home/me/train.py:23 train", MAIN)


class Card:
    """A card whose blocks are placed by hand; it writes down what PyTorch would."""

    def __init__(self):
        self.events, self.segments, self.live = [], [], {}
        self.clock = 1_700_000_000_000_000

    def segment(self, start, size, *, kind="large", stream=0, expandable=False):
        self.segments.append({"start": start, "size": size, "kind": kind, "stream": stream,
                              "expandable": expandable})  # fmt: skip
        self._event("segment_map" if expandable else "segment_alloc", start, size, SCRIPT, stream)

    def drop_segment(self, start):
        (gone,) = [s for s in self.segments if s["start"] == start]
        self.segments.remove(gone)
        action = "segment_unmap" if gone["expandable"] else "segment_free"
        self._event(action, start, gone["size"], SCRIPT, gone["stream"])

    def alloc(self, address, size, stack=FORWARD, *, taken=None):
        assert address not in self.live
        taken = taken or -(-size // 512) * 512
        self.live[address] = {"size": taken, "requested_size": size, "frames": stack,
                              "state": "active_allocated"}  # fmt: skip
        self._event("alloc", address, size, stack)

    def free(self, address, stack=BACKWARD, *, awaits=False):
        size = self.live[address]["requested_size"]
        self._event("free_requested", address, size, stack)
        if awaits:
            self.live[address]["state"] = "active_awaiting_free"
        else:
            del self.live[address]
            self._event("free_completed", address, size, stack)

    def out_of_memory(self, size, free, stack=FORWARD):
        self._event("oom", None, size, stack)
        self.events[-1]["device_free"] = free

    def _event(self, action, address, size, stack, stream=0):
        self.clock += 10
        event = {"action": action, "size": size, "stream": stream, "time_us": self.clock}
        if address is not None:
            event["addr"] = BASE + address
        self.events.append({**event, "frames": stack})

    def snapshot(self, *, most_events=None, **more):
        """Return what PyTorch returns, with the newest events alone where it keeps so many."""
        kept = self.events if most_events is None else self.events[len(self.events) - most_events :]
        return {
            "segments": [self._segment(s) for s in self.segments],
            "device_traces": [kept],
            "allocator_settings": {"expandable_segments": False},
            **more,
        }

    def _segment(self, segment):
        start, end = segment["start"], segment["start"] + segment["size"]
        blocks, at = [], start
        for address in [*sorted(a for a in self.live if start <= a < end), end]:
            if address > at:
                blocks.append({"address": BASE + at, "size": address - at, "requested_size": 0,
                               "state": "inactive", "frames": []})  # fmt: skip
            if address < end:
                blocks.append({"address": BASE + address, **self.live[address]})
                at = address + self.live[address]["size"]
        active = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
        return {"device": 0, "address": BASE + start, "total_size": segment["size"],
                "stream": segment["stream"], "segment_type": segment["kind"],
                "segment_pool_id": (0, 0), "is_expandable": segment["expandable"],
                "allocated_size": active, "active_size": active, "blocks": blocks}  # fmt: skip


def training(num_steps=5, *, leaks=False, card=None):
    """Return a card after steps of 4 MiB parameters, 8 MiB activations and AdamW, by hand.

    Live at the peak, in backward of the second step and later: 4 MiB of parameters, 8 MiB of
    optimizer state, 8 MiB of activations, 4 MiB of gradients and 1 MiB of temporaries: 25 MiB, and
    1 MiB more for each step before if it leaks.
    """
    card = card or Card()
    card.segment(0, 64 * MIB)
    card.alloc(0, 4 * MIB, BUILD)
    for step in range(num_steps):
        card.alloc(20 * MIB, 8 * MIB, FORWARD)
        card.alloc(28 * MIB, MIB, FORWARD)
        card.free(28 * MIB, FORWARD)
        if leaks:
            card.alloc((40 + step) * MIB, MIB, KEPT)
        card.alloc(30 * MIB, 4 * MIB, BACKWARD)
        card.alloc(34 * MIB, MIB, BACKWARD)
        card.free(34 * MIB, BACKWARD)
        card.free(20 * MIB, BACKWARD)
        if step == 0:
            card.alloc(4 * MIB, 4 * MIB, ADAM)
            card.alloc(8 * MIB, 4 * MIB, ADAM)
        card.alloc(36 * MIB, 2 * MIB, UPDATE)
        card.free(36 * MIB, UPDATE)
        card.free(30 * MIB, ZERO_GRAD)
    return card


def fragmented(request=12 * MIB, free=2 * MIB):
    """Return 40 MiB in two segments, 20 MiB of them free in holes of 10, 6 and 4 MiB."""
    card = Card()
    card.segment(0, 20 * MIB)
    card.segment(100 * MIB, 20 * MIB)
    card.alloc(0, 10 * MIB)
    card.alloc(10 * MIB, 10 * MIB)
    card.alloc(100 * MIB, 6 * MIB)
    card.alloc(106 * MIB, 10 * MIB)
    card.free(10 * MIB, SCRIPT)
    card.free(100 * MIB, SCRIPT)
    card.out_of_memory(request, free)
    return card


def dump(path, snapshot, protocol=4):
    """Write a snapshot as PyTorch does."""
    path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return path


def brute_force(events):
    """Return the live bytes after each event of a whole trace, block by block."""
    live, total = {}, [0]
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = -(-event["size"] // 512) * 512
        elif event["action"] == "free_requested":
            del live[event["addr"]]
        total.append(sum(live.values()))
    return total
