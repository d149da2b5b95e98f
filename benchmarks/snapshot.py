"""How much memory and time does it take to open a snapshot of 1 GB?

Each row is a file that is written here and a process of its own that opens it. The files hold what
`torch.cuda.memory._dump_snapshot` writes of a long training, with a stack of 60 frames for each
event, in three layouts: frames that events share (as PyTorch writes them), frames of their own for
each event (as a writer does that shares none), and no stacks at all (`context=None`), which has
most events a byte.
Counted is the whole process: its resident peak (VmHWM of Linux) and the wall time of
`open_snapshot` and of drawing the timeline. Goals: 8 GiB and five minutes. The peer is
`pickle.load`, which builds every dict too and checks nothing: its memory for a byte of the file is
taken from a file of 20 MB, since for 1 GB it would take up to 12 GB.
"""

import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.meta_init import resident
from memlab._util.units import GIB, MIB

NUM_BYTES, NUM_BYTES_QUICK = 10**9, 2 * 10**7
MOST_RESIDENT_BYTES, MOST_SECONDS = 8 * GIB, 300.0
LAYOUTS = ("shared frames", "own frames", "no stacks")
DEPTH, NUM_STACKS = 60, 2000
BLOCKS_A_STEP = 500
FIRST_ADDRESS, FIRST_TIME_US = 0x7F0000000000, 1_700_000_000_000_000
CODE = "import json; from benchmarks import snapshot; print(json.dumps(snapshot.{}({!r})))"

Frame = tuple[str, int, str]


class Emitter:
    """Writes the opcodes of protocol 4 as `pickle` does, without holding the objects."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x04")
        self._memo: dict[Any, bytes] = {}  # what refers to an object, by its name
        self._count = 0
        self._parts: dict[Any, tuple[bytes, int] | None] = {}

    def begin(self, opcode: bytes, name: Any = None) -> None:
        """Begin a dict or a list of several items; a name lets later bytes refer to it."""
        self.out += opcode
        self._put(name)
        self.out += b"("

    def known(self, name: Any) -> bool:
        """Refer to an earlier object, if there is one of this name."""
        reference = self._memo.get(name)
        if reference is None:
            return False
        self.out += reference
        return True

    def part(self, name: Any, write: Callable[[], None]) -> None:
        """Write what `write` writes; from the third time on as a copy of the second."""
        copy = self._parts.get(name)
        if copy is not None:
            self.out += copy[0]
            self._count += copy[1]
            return
        start, count = len(self.out), self._count
        write()
        is_second = name in self._parts
        self._parts[name] = (bytes(self.out[start:]), self._count - count) if is_second else None

    def text(self, text: str) -> None:
        """Write a text, or refer to it."""
        if not self.known(text):
            raw = text.encode()
            self.out += b"\x8c%c%b" % (len(raw), raw)
            self._put(text)

    def number(self, value: int) -> None:
        """Write a whole number that is not below zero."""
        if value < 256:
            self.out += b"K%c" % value
        elif value < 65536:
            self.out += b"M" + value.to_bytes(2, "little")
        elif value < 2**31:
            self.out += b"J" + value.to_bytes(4, "little")
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
            self.out += b"\x8a%c%b" % (len(raw), raw)

    def _put(self, name: Any) -> None:
        if name is not None:
            number = self._count
            self._memo[name] = (
                b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
            )
        self._count += 1
        self.out += b"\x94"


def stack(number: int) -> list[Frame]:
    """Return the frames of one stack, the innermost first; stacks share their outer frames."""
    layer = number % 50
    inner = [(f"/site/model/part_{layer}.py", 10 + depth + number % 97, f"forward_{depth}")
             for depth in range(DEPTH // 2)]  # fmt: skip
    outer = [(f"/home/user/train_{depth}.py", 100 + depth, f"main_{depth}")
             for depth in range(DEPTH - len(inner))]  # fmt: skip
    return inner + outer


def write(path: Path, layout: str, num_bytes: int) -> int:
    """Write a snapshot of about so many bytes; return how many events it has.

    Each step allocates blocks and frees all but one of them.
    """
    stacks = [stack(number) for number in range(NUM_STACKS)] if layout != "no stacks" else []
    emitter, count, address = Emitter(), 0, FIRST_ADDRESS
    emitter.begin(b"}")
    emitter.text("segments")
    emitter.begin(b"]")
    emitter.out += b"e"
    emitter.text("device_traces")
    emitter.begin(b"]")
    emitter.begin(b"]")
    emitter.out += b"e"

    with path.open("wb") as file:
        while file.tell() + len(emitter.out) < num_bytes:
            emitter.out += b"("
            for i in range(BLOCKS_A_STEP):
                for action in ("alloc", "free_requested", "free_completed")[: 3 if i else 1]:
                    frames = stacks[(count + 7 * i) % NUM_STACKS] if stacks else []
                    place = address + MIB * i, 2048 * (i + 1)
                    _event(emitter, action, place, FIRST_TIME_US + count, frames, layout)
                    count += 1
            emitter.out += b"e"
            address += MIB  # the first block of each step stays
            file.write(emitter.out)
            emitter.out.clear()
        file.write(b"eu.")

    return count


def _event(
    emitter: Emitter,
    action: str,
    place: tuple[int, int],
    time_us: int,
    frames: list[Frame],
    layout: str,
) -> None:
    emitter.begin(b"}")
    emitter.text("action")
    emitter.text(action)
    numbers = {"addr": place[0], "size": place[1], "stream": 0, "time_us": time_us}
    for key, value in numbers.items():
        emitter.text(key)
        emitter.number(value)
    if frames:
        emitter.text("frames")
        emitter.part(id(frames), lambda: _frames(emitter, frames, layout))
    emitter.out += b"u"


def _frames(emitter: Emitter, frames: list[Frame], layout: str) -> None:
    emitter.begin(b"]")
    for frame in frames:
        _frame(emitter, frame, layout)
    emitter.out += b"e"


def _frame(emitter: Emitter, frame: Frame, layout: str) -> None:
    if layout == "shared frames" and emitter.known(frame):
        return
    emitter.begin(b"}", frame)
    for key, value in zip(("filename", "line", "name"), frame, strict=True):
        emitter.text(key)
        if isinstance(value, str):
            emitter.text(value)
        else:
            emitter.number(value)
    emitter.out += b"u"


def opened(path: str) -> dict[str, Any]:
    """Return what it takes to open a snapshot in this process, and to draw it."""
    import memlab

    open_snapshot, plots = memlab.open_snapshot, memlab.plots  # imported here, when first named
    before, start = resident("VmRSS"), time.perf_counter()
    snapshot = open_snapshot(path)
    seconds = time.perf_counter() - start
    plots.to_png(plots.snapshot_timeline(snapshot))
    return {
        "events": snapshot.num_events,
        "peak told, bytes": snapshot.peak_allocated_bytes,
        "open, seconds": seconds,
        "open and draw, seconds": time.perf_counter() - start,
        "resident peak, bytes": resident("VmHWM"),
        "bytes a byte": (resident("VmHWM") - before) / Path(path).stat().st_size,
    }


def loaded(path: str) -> float:
    """Return how many bytes of memory `pickle.load` takes for a byte of a file, in this process."""
    before = resident("VmRSS")
    with Path(path).open("rb") as file:
        kept = pickle.load(file)
    assert kept["device_traces"]
    return (resident("VmHWM") - before) / Path(path).stat().st_size


def rows(num_bytes: int) -> list[dict[str, Any]]:
    """Return one row for each layout, each from a fresh process."""
    found = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "snapshot.pickle")
            write(path, layout, NUM_BYTES_QUICK)
            peer = json.loads(report.fresh_python(CODE.format("loaded", str(path))).stdout)
            count = write(path, layout, num_bytes)
            size = path.stat().st_size
            taken = json.loads(report.fresh_python(CODE.format("opened", str(path))).stdout)
        assert taken["events"] == count, "events were lost"
        met = (
            taken["resident peak, bytes"] <= MOST_RESIDENT_BYTES
            and taken["open, seconds"] <= MOST_SECONDS
        )
        found.append({"layout": layout, "file, bytes": size, **taken, "pickle.load": peer,
                      "goals": report.verdict(met)})  # fmt: skip
    return found


def main() -> None:
    """Write and open a snapshot in every layout."""
    given, before = report.options(__file__, __doc__), report.environment()
    found = rows(NUM_BYTES_QUICK if given.quick else NUM_BYTES)
    report.show("opening a snapshot; goals: 8 GiB and 300 s", found)
    report.write(given, before, {"rows": found})


if __name__ == "__main__":
    main()
