"""`explain_error`: which causes an out-of-memory error can have, and which it cannot.

A terminal's text comes in. Its first error that ran out of memory is read, every size as the range
of bytes that PyTorch rounds to the two digits it prints, and each known cause gets a verdict with
the numbers that decide it. A snapshot and a result of the workload decide what a message cannot.

The forms are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 1.0 to 2.9; "cached" of 1.0 to 1.3
is reserved without what is allocated), `c10/xpu/XPUCachingAllocator.cpp`,
`aten/src/ATen/mps/MPSAllocator.mm` (its GB are 2**30 bytes), `c10/core/impl/alloc_cpu.cpp` and
`c10/cuda/CUDAMallocAsyncAllocator.cpp`; of libraries those of cuBLAS, cuDNN, NCCL, bitsandbytes
(the macro of CUDA's samples), vLLM's cache; of drivers and of the system the names of the error.
Left out: the texts of JAX and TensorFlow, which are named and not read.
"""

import html
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from memlab._util.checks import checked
from memlab._util.tables import columns_table
from memlab._util.units import GIB, MIB, TIB, format_bytes, format_percent
from memlab.errors import ConfigError
from memlab.integrations.snapshot import Snapshot, open_snapshot
from memlab.result import StepResult


class CauseName(StrEnum):
    """The known causes."""

    STEP = "too large a step"
    REQUEST = "one tensor larger than the card"
    FRAGMENTATION = "fragmentation"
    OTHER_PROCESS = "another process"
    LIMIT = "a limit on the process"
    LEAK = "a leak"
    EVALUATION = "evaluation or generation"
    LIBRARY = "a library's workspace"
    HOST = "host memory"
    SHARED = "shared memory"


class Likelihood(StrEnum):
    """What can be said of a cause."""

    LIKELY = "likely"
    POSSIBLE = "possible"
    UNKNOWN = "unknown"
    EXCLUDED = "excluded"


LIKELY, POSSIBLE, UNKNOWN, EXCLUDED = Likelihood
NEXT: Mapping[CauseName, str] = {
    CauseName.STEP: "a smaller batch, or what memlab.explain and memlab.recommend offer",
    CauseName.REQUEST: "the shapes on the line that failed, such as an attention matrix",
    CauseName.FRAGMENTATION: "PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9: "
    "PYTORCH_CUDA_ALLOC_CONF)",
    CauseName.OTHER_PROCESS: "nvidia-smi: end it, or take another card by CUDA_VISIBLE_DEVICES",
    CauseName.LIMIT: "torch.cuda.set_per_process_memory_fraction, vLLM's gpu_memory_utilization, "
    "or what the driver or the system lets one process have",
    CauseName.LEAK: "torch.cuda.memory_allocated() at the end of several steps, or memlab.watch; "
    "a sum of losses that are not .item() is the usual one",
    CauseName.EVALUATION: "torch.no_grad(), a smaller batch there, outputs moved to the CPU "
    "(eval_accumulation_steps)",
    CauseName.LIBRARY: "whether a smaller batch works; CUBLAS_WORKSPACE_CONFIG; "
    "torch.backends.cudnn.benchmark = False",
    CauseName.HOST: "dmesg and free -h: fewer DataLoader workers, a smaller batch, a larger limit",
    CauseName.SHARED: "df -h /dev/shm: --shm-size or --ipc=host of docker, or fewer workers",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCause:
    """One cause of an out-of-memory error.

    Attributes:
        name: of the cause.
        verdict: "likely", "possible", "unknown" (it cannot be known from this) or "excluded".
        why: a sentence with the numbers that decide it.
        look_at: what to look at or to do next.
    """

    name: CauseName
    verdict: Likelihood
    why: str
    look_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorExplanation:
    """What an out-of-memory error says.

    Attributes:
        message: one sentence: what ran out, or why nothing can be said.
        numbers: bytes that were read, by name; the middle of what PyTorch rounds to the text.
        causes: those that apply to this kind of memory, the likely ones first.
        notes: what else a reader should know: numbers that contradict one another, what held most.
    """

    message: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    causes: tuple[ErrorCause, ...] = ()
    notes: tuple[str, ...] = ()

    def of_verdict(self, verdict: str) -> tuple[CauseName, ...]:
        """Return the causes with this verdict."""
        return tuple(cause.name for cause in self.causes if cause.verdict == verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"message": self.message, "numbers": dict(self.numbers),
                "causes": [asdict(cause) for cause in self.causes],
                "notes": list(self.notes)}  # fmt: skip

    def __str__(self) -> str:
        """Return a page for a terminal."""
        lines = [self.message]
        lines += [f"  {name.removesuffix('_bytes').replace('_', ' ')}: {format_bytes(size)}"
                  for name, size in self.numbers.items()]  # fmt: skip
        for cause in self.causes:
            lines.append(f"{cause.verdict}: {cause.name}: {cause.why}")
            if cause.verdict in (LIKELY, POSSIBLE):
                lines.append(f"    next: {cause.look_at}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        """Return a table of the causes for notebooks."""
        rows = [(cause.verdict, cause.name, cause.why, cause.look_at) for cause in self.causes]
        table = columns_table(("verdict", "cause", "why", "look at"), rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<p>{html.escape(self.message)}</p>{table}{notes}"


# Reading the text.

MOST_CHARACTERS = 10**7
REACH = 1500  # characters that one message of PyTorch can take
CARD, LIBRARY, CACHE, BARE, HOST, KILLED, SHARED, FOREIGN = (
    "card", "library", "cache", "bare", "host", "killed", "shared", "foreign",
)  # fmt: skip
_SIZE = r"(\d[\d.,]*) ?(bytes|[KMGTPE]i?B)"
KINDS = {
    FOREIGN: r"RESOURCE_EXHAUSTED|ResourceExhaustedError|_bfc\) ran out of memory",
    CARD: r"(?:CUDA|HIP|XPU|MPS backend)?,? out of memory\b.{0,200}?Tried to allocate|"
    r"Current platform can NOT allocate memory block.{0,60}?Tried to allocate|"
    rf"Tried to allocate (?:more than )?{_SIZE}|Invalid buffer size: {_SIZE}|"
    r"Allocation on device.{0,20} would exceed allowed memory",
    LIBRARY: r"CU(?:BLAS|DNN)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|"
    r"(?:Cuda|HIP) failure (?:2 )?'out of memory'|Unable to find a valid cuDNN algorithm|"
    r"unable to find an engine to execute this computation|Error out of memory at line \d+ in file",
    CACHE: r"No available memory for the cache blocks|"
    r"larger than the (?:maximum number of tokens .{0,20}stored in|available) KV cache|"
    r"CUDA out of memory occurred when warming up|"
    r"Free memory on device .{0,60}is less than desired GPU memory utilization",
    BARE: r"\b(?:CUDA|cuda|HIP|XPU|Triton)\b[\w \[\]()]{0,40}: ?out of memory|"
    r"error=2 : out of memory|(?:CUDA|HIP|XPU) out of memory|cudaErrorMemoryAllocation|"
    r"CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|OUT_OF_DEVICE_MEMORY|"
    r"kIOGPUCommandBufferCallbackErrorOutOfMemory|"
    r"\bran out of memory(?: on GPU #\d+)?, skipping batch",
    SHARED: r"killed by signal: Bus error|insufficient shared memory|out of shared memory|"
    r"RuntimeError: unable to write to file\b|creating shared memory segment|"
    r"unable to (?:open|resize) .{0,60}No space left on device",
    HOST: r"DefaultCPUAllocator: can't allocate memory|not enough memory: you tried to allocate|"
    r"unable to mmap|Cannot allocate memory|(?:(?:\b|_Array)MemoryError|"
    r"\bstd::bad_alloc)\b(?!.{0,80}(?:cuda|CUDA))|paging file is too small|"
    r"OUT_OF_HOST_MEMORY|\boom[-_ ]kill|OOMKilled|node running low on memory|"
    r"worker (?:\([^()]{0,80}(?:\(s\))?[^()]{0,80}\) )?is killed by signal\w*: Killed",
    KILLED: r"^[ \t]*Killed[ \t]*$|\d\s+Killed\b|"
    r"\b(?:exit ?(?:code|status)|return ?code)[\s:=]*(?:-9|137)\b|\bSIGKILL\b",
}  # fmt: skip
NUMBERS = {
    "requested_bytes": rf"(?:[Tt]ried|Unable) to allocate (?:more than )?{_SIZE}|"
    rf"unable to mmap {_SIZE}|Requested : {_SIZE}|Invalid buffer size: {_SIZE}",
    "capacity_bytes": rf"\btotal (?:capaci?ty of )?{_SIZE}|{_SIZE} total capacity|"
    rf"Device limit : {_SIZE}|"
    r"Free memory on device .{0,12}\([\d.]+/([\d.]+) (GiB)\)",
    "free_bytes": rf"of which {_SIZE} is free|{_SIZE} free[;)]|Free \(according to CUDA\): {_SIZE}|"
    r"Free memory on device .{0,12}\(([\d.]+)/[\d.]+ (GiB)\)",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "allowed_bytes": rf"{_SIZE} allowed[;.]|max allowed: {_SIZE}|memory fraction\) : {_SIZE}",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|"
    rf"MPS allocated: {_SIZE}|Currently allocated : {_SIZE}",
    "private_pool_bytes": rf"{_SIZE} allocated in private pools",
    "unallocated_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached\)",
    "reserved_bytes": rf"{_SIZE} reserved in total",
    "outside_bytes": rf"other allocations: {_SIZE}",
}
_OTHER = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_NOISE = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|<[/a-zA-Z][^<>]{0,200}>|[\u2500-\u257f]|"
    r"^[ \t]*(?:> ?)+|^[ \t]*(?:\[(?:rank)?\d+\]:|\([^()\n]{0,60}pid=\d+[^()\n]{0,60}\))",
    re.MULTILINE,
)


class Range(NamedTuple):
    """The bytes that a printed size can stand for."""

    low: int
    high: int

    def __add__(self, other: tuple[int, ...]) -> "Range":  # type: ignore[override]
        return Range(self.low + other[0], self.high + other[1])

    def __sub__(self, other: tuple[int, ...]) -> "Range":
        return Range(self.low - other[1], self.high - other[0])

    @property
    def middle(self) -> int:
        """The bytes to print."""
        return (self.low + self.high) // 2

    def __str__(self) -> str:
        return format_bytes(self.middle)


NOTHING = Range(0, 0)


def _size(number: str, unit: str) -> Range:
    """Return what a size can stand for, in units of 2**10, with the digits that are printed."""
    number = number.rstrip(".,").replace(",", "")
    if unit == "bytes":
        return Range(*[round(float(number))] * 2)
    factor = 1024 ** ("KMGTPE".index(unit[0]) + 1)
    half = 0.5 * 10 ** -len(number.partition(".")[2])
    return Range(*(round((float(number) + side * half) * factor) for side in (-1, 1)))


def _found(pattern: str | re.Pattern[str], text: str) -> list[Range]:
    found = []
    for match in re.finditer(pattern, text):
        number, unit = (group for group in match.groups() if group)
        try:
            found.append(_size(number, unit))
        except (ValueError, OverflowError):  # "1.2.3 GiB", or a thousand digits
            continue
    return found


class _Error(NamedTuple):
    """The first error of a text: its kind, its words, its numbers, and the whole text."""

    kind: str
    words: str
    sizes: dict[str, Range]
    others: list[Range]
    text: str


def _read(message: str) -> _Error | None:
    lines = _NOISE.sub(" ", html.unescape(message))
    flat = re.sub(r"\s+", " ", lines)
    first: tuple[int, int, str] | None = None
    for kind, pattern in KINDS.items():
        text = lines if kind == KILLED else flat
        match = re.search(pattern, text, re.MULTILINE)
        # where the lines were joined, only an error of another kind is earlier than a kill
        start = len(flat) if kind == KILLED else match.start() if match else 0
        if match and (first is None or start < first[0]):
            first = (start, match.end(), kind)
    if first is None:
        return None
    start, end, kind = first
    following = re.search(KINDS[CARD], flat[end:])
    stop = min(start + REACH, end + following.start() if following else len(flat))
    words = flat[start:stop] if kind != KILLED else ""
    sizes = {name: found[0] for name, pattern in NUMBERS.items()
             if (found := _found(pattern, words))}  # fmt: skip
    return _Error(kind, words, sizes, _found(_OTHER, words), lines)


# Deciding.

EVALUATES = re.compile(
    r"\b_?(?:evaluation_loop|nested_concat|prediction_step|validation_step|predict_step|"
    r"eval_epoch|evaluation_step|run_sanity_check|run_evaluation)\b|"
    r"\bin (?:\w+\.)*(?:evaluate|validate|validation|generate|inference|test)\b|"
    r"\b(?:model|trainer)\.(?:generate|evaluate|validate|predict)\("
)
EVALUATES_BY_NAME = re.compile(  # of a function or a file that is the person's own
    r"^(?:\w*_)?(?:(?:eval|validat)\w*|val(?:id)?(?:_\w*)?|test_(?:step|epoch|loop))$|"
    r"(?:^|[\\/])(?:(?:eval|valid|infer)\w*|generate|predict|sample|test)\.py$"
)
EVALUATES_BY_BAR = re.compile(  # in the last line that tells a progress
    r"\b(?:valid|validating|validation|evaluating|evaluation|testing|predicting)\b", re.IGNORECASE
)
PROGRESS = re.compile(r"^.*\d%.*$", re.MULTILINE)
TRAINS = re.compile(
    r"\.backward\(|\boptim\w*\.step\(|\bin (?:training_step|compute_loss|_init_group)\b|"
    r"\btrain_one_epoch\b|\brun_backward\b"
)
FIRST_STEP = re.compile(r"_init_group|\bin (?:\w+\.)*(?:_apply|from_pretrained|load_state_dict)\b")
BEGINS = re.compile(r"\b0%\|(?![^|\n]*\| *[1-9])")
LATER = re.compile(
    r"\b[1-9]\d?%\||\b0%\|[^|\n]*\| *[1-9]|"
    r"\b(?:epoch|iter(?:ation)?|it|step)[ :=\[]{1,5}(?:[2-9]|[1-9]\d)|\[ *[1-9]\d+/\d+\]",
    re.IGNORECASE,
)
LOADING = re.compile(  # lines whose progress is not that of steps
    r"^.*(?:loading|fetching|shards|\bmap\b|tokeniz|\bfilter\b|extracting).*$",
    re.IGNORECASE | re.MULTILINE,
)
PINS = re.compile(r"\bpin memory thread\b|\bin (?:\w+\.)*_?pin_memory\b|\bcudaHostAlloc\b")
CONTEXT_BYTES = 3 * GIB // 2  # most that a context with its libraries takes as a rule
MOST_OF_A_CARD = 100 * GIB
SLACK_BYTES = 128 * MIB  # that a driver may refuse although it counts as free
MOST_SHARE, LARGE_SHARE, LITTLE_SHARE, SMALL_SHARE = 0.6, 0.25, 0.05, 0.02

_Verdicts = dict[CauseName, tuple[Likelihood, str]]


def _of_card(error: _Error) -> tuple[_Verdicts, list[str]]:
    """Return the verdicts that the numbers of a caching allocator decide."""
    sizes = error.sizes
    asked, capacity, free = (
        sizes.get(f"{name}_bytes") for name in ("requested", "capacity", "free")
    )
    allocated = sizes.get("allocated_bytes")
    notes: list[str] = []
    reserved = sizes.get("reserved_bytes")
    unallocated = sizes.get("unallocated_bytes")
    if reserved and allocated and unallocated is None:
        unallocated = reserved - allocated
        unallocated = Range(max(unallocated.low, 0), unallocated.high)
    if reserved is None and allocated and unallocated:
        reserved = allocated + unallocated
    verdicts: _Verdicts = {
        CauseName.HOST: (EXCLUDED, "the memory of the card ran out"),
        CauseName.SHARED: (EXCLUDED, "the memory of the card ran out"),
    }
    if asked and capacity:
        level = POSSIBLE if asked.high > capacity.low else EXCLUDED
        level = LIKELY if asked.low > capacity.high else level
        verdicts[CauseName.REQUEST] = level, f"{asked} in one piece, of a card with {capacity}"
    elif asked and asked.low > MOST_OF_A_CARD:
        level = LIKELY if asked.low > TIB else POSSIBLE
        verdicts[CauseName.REQUEST] = level, f"{asked} in one piece is more than most cards have"
    if "Invalid buffer size" in error.words:
        verdicts[CauseName.REQUEST] = LIKELY, f"Metal gives no buffer of {asked}"
    if "can NOT allocate memory block" in error.words:
        verdicts[CauseName.LIMIT] = LIKELY, "the driver gives no piece of that size"
    if asked is None or free is None:
        if capacity is None and "allowed_bytes" in sizes:
            return verdicts | _of_mps(sizes), notes
        return _of_few(asked, capacity, free, reserved or allocated) | verdicts, notes
    verdicts[CauseName.LIMIT] = _limit(sizes, asked, free, reserved)
    if verdicts[CauseName.LIMIT][0] is EXCLUDED and re.match("HIP|XPU", error.words):
        verdicts[CauseName.LIMIT] = UNKNOWN, "the driver may offer less than the card has"
    if unallocated is not None:
        verdicts[CauseName.FRAGMENTATION] = _fragmentation(asked, free, unallocated, reserved)
    if capacity and reserved and reserved.low > capacity.high and free.high < SLACK_BYTES:
        held = f"PyTorch holds {reserved}, more than the {capacity} of the card"
        verdicts[CauseName.STEP] = LIKELY, held
        notes.append("Windows lends a process host memory when the card has none left")
    elif capacity and reserved:
        if (reserved + free).low > capacity.high or any(
            size.low > capacity.high for size in (free, *error.others)
        ):
            notes.append("the numbers contradict one another: more is free and reserved than the "
                         "card has; was the text edited?")  # fmt: skip
            return {cause: (UNKNOWN, "the numbers contradict one another") for cause in CauseName
                    if cause not in (CauseName.HOST, CauseName.SHARED)} | {
                        cause: verdicts[cause] for cause in (CauseName.HOST, CauseName.SHARED)
                    }, notes  # fmt: skip
        verdicts |= _beside(error, asked, capacity, free, reserved)
        share = reserved.middle / capacity.middle
        held = f"PyTorch itself holds {reserved}, {format_percent(share)} of the card"
        if _had_room(asked, free):
            verdicts[CauseName.STEP] = (UNKNOWN, f"{asked} was refused while {free} was free")
        elif share >= MOST_SHARE:
            verdicts[CauseName.STEP] = (LIKELY, held)
        else:
            verdicts[CauseName.STEP] = (POSSIBLE, held)
    else:
        verdicts = _of_few(asked, capacity, free, allocated) | verdicts
    return verdicts, notes


FULL = "it may hold what is missing; the message does not say"


def _of_few(
    asked: Range | None, capacity: Range | None, free: Range | None, held: Range | None
) -> _Verdicts:
    """Return what is decided where the message does not say who holds the card."""
    if asked and asked.low > min(MOST_OF_A_CARD, capacity.high if capacity else MOST_OF_A_CARD):
        return {}
    if capacity and held and held.middle >= MOST_SHARE * capacity.middle:
        return {CauseName.STEP: (LIKELY, f"PyTorch itself holds {held} of {capacity}")}
    left = free or (capacity - held if capacity and held is not None else None)
    if asked and left and _had_room(asked, left):
        said = f"{asked} was refused although PyTorch leaves {left} of the card"
        return dict.fromkeys((CauseName.LIMIT, CauseName.OTHER_PROCESS), (POSSIBLE, said))
    return dict.fromkeys((CauseName.STEP, CauseName.OTHER_PROCESS), (POSSIBLE, FULL))


def _of_mps(sizes: Mapping[str, Range]) -> _Verdicts:
    """Return what the limit of Apple's cards decides."""
    allowed, asked = sizes["allowed_bytes"], sizes.get("requested_bytes", NOTHING)
    held = sizes.get("allocated_bytes", NOTHING)
    outside = sizes.get("outside_bytes", NOTHING)
    found: _Verdicts = {
        CauseName.STEP: (
            LIKELY if held.low > allowed.high // 2 else POSSIBLE,
            f"PyTorch holds {held} of the {allowed} that it may take",
        ),
        CauseName.LIBRARY: (
            POSSIBLE if outside.low > held.high else EXCLUDED,
            f"{outside} is held beside tensors",
        ),
    }
    found[CauseName.LIMIT] = POSSIBLE, f"the {allowed} are a limit of PyTorch's own"
    if asked.low > allowed.high:
        found[CauseName.REQUEST] = (LIKELY, f"{asked} in one piece is more than {allowed}")
    return found


def _had_room(asked: Range, free: Range) -> bool:
    """Return whether the request failed although it would have fitted, with what drivers keep."""
    return free.low >= asked.high + SLACK_BYTES


def _limit(
    sizes: Mapping[str, Range], asked: Range, free: Range, reserved: Range | None
) -> tuple[Likelihood, str]:
    allowed, capacity = sizes.get("allowed_bytes"), sizes.get("capacity_bytes", NOTHING)
    if allowed is not None and allowed.high < (capacity.low or allowed.high + 1):
        if reserved and (reserved + asked).low > allowed.high:
            return LIKELY, f"{reserved} reserved and {asked} asked for are more than {allowed}"
        return POSSIBLE, f"the process may take {allowed}"
    if _had_room(asked, free):
        return POSSIBLE, f"{free} was free when the message was written, more than {asked}"
    return EXCLUDED, f"{free} was free for a request of {asked}, and the message names no limit"


def _fragmentation(
    asked: Range, free: Range, unallocated: Range, reserved: Range | None
) -> tuple[Likelihood, str]:
    if _had_room(asked, free):
        return EXCLUDED, f"the card had {free} free for a request of {asked}"
    if (unallocated + free).high < asked.low:
        return EXCLUDED, (
            f"even in one piece {unallocated} unallocated and {free} free are less than {asked}"
        )
    share = unallocated.middle / max(reserved.middle if reserved else 1, 1)
    said = f"{unallocated} is reserved but unallocated, {format_percent(share)} of what is reserved"
    if share >= 0.5 or (share >= LARGE_SHARE and unallocated.low >= asked.high):
        return LIKELY, f"{said}; with {free} free on the card it would hold {asked} in one piece"
    if share < LITTLE_SHARE:
        return UNKNOWN, f"{said}, which any run has"
    return POSSIBLE, f"{said}; {asked} was asked for"


def _beside(
    error: _Error, asked: Range, capacity: Range, free: Range, reserved: Range
) -> _Verdicts:
    """Return whether another process, or a library in this one, holds what is missing."""
    if asked.low > capacity.high:
        even = EXCLUDED, f"even an empty card has less than {asked}"
        return {CauseName.LIBRARY: even, CauseName.OTHER_PROCESS: even}
    own, rest = error.sizes.get("process_bytes"), capacity - free
    others = list(error.others)
    if own is None and others:
        # In a container the process does not know its own number and is listed as another.
        largest = max(others)
        if (largest + reserved + free).low > capacity.high:
            own = largest
            others.remove(largest)
    found: _Verdicts = {}
    if own is None:
        outside, whose = rest - reserved, "other processes and the libraries of this one"
        # what a context takes as a rule is this process's own
        other = outside - (CONTEXT_BYTES, CONTEXT_BYTES)
        found[CauseName.LIBRARY] = UNKNOWN, f"{whose} hold {_at_least_0(outside)} together"
    else:
        other, whose = rest - own, "other processes"
        library = own - reserved
        share = library.middle / capacity.middle
        if library.high <= CONTEXT_BYTES:
            level = EXCLUDED
        else:
            level = LIKELY if share >= LARGE_SHARE else POSSIBLE
        found[CauseName.LIBRARY] = level, f"{_at_least_0(library)} of this process is not PyTorch's"
        outside = other
    if _had_room(asked, free):
        found[CauseName.LIBRARY] = EXCLUDED, f"the card had {free} free for a request of {asked}"
    share = other.middle / capacity.middle
    said = f"{whose} hold {_at_least_0(outside)} of {capacity}"
    if share >= LARGE_SHARE and (free + other).high >= asked.low:
        found[CauseName.OTHER_PROCESS] = LIKELY, said
    elif _had_room(asked, free):
        found[CauseName.OTHER_PROCESS] = (
            POSSIBLE, f"{said}; another may have held more when the request failed",
        )  # fmt: skip
    elif own is not None and (share < SMALL_SHARE or (free + other).high < asked.low):
        found[CauseName.OTHER_PROCESS] = EXCLUDED, f"{said}, too little to matter"
    elif own is None and outside.high < CONTEXT_BYTES // 2:
        found[CauseName.OTHER_PROCESS] = EXCLUDED, f"{said}, no more than a context"
    else:
        found[CauseName.OTHER_PROCESS] = POSSIBLE, said
    return found


def _at_least_0(size: Range) -> str:
    return format_bytes(max(size.middle, 0))


def _hints(error: _Error, verdicts: _Verdicts) -> _Verdicts:
    """Return what the lines of the traceback say of a leak and of evaluation."""
    text, found = error.text, {}
    trains = TRAINS.search(text)
    frames = [] if trains else _own_frames(_before(text)) or _own_frames(text)
    own = [name for frame in frames for name in (frame[2], frame[0])]
    evaluates = EVALUATES.search(text)
    for name in own:
        evaluates = evaluates or EVALUATES_BY_NAME.search(name)
    if not trains and (bars := PROGRESS.findall(text)):
        evaluates = evaluates or EVALUATES_BY_BAR.search(bars[-1])
    if evaluates:
        found[CauseName.EVALUATION] = LIKELY, f"the text has {evaluates.group().strip()!r}"
    elif trains:
        found[CauseName.EVALUATION] = EXCLUDED, f"the text has {trains.group().strip()!r}"
    steps = LOADING.sub("", text)
    if match := FIRST_STEP.search(text):
        found[CauseName.LEAK] = EXCLUDED, f"nothing has run before {match.group().strip()!r}"
    elif match := LATER.search(steps):
        found[CauseName.LEAK] = POSSIBLE, f"steps had passed before ({match.group().strip()!r})"
        if error.kind == BARE:
            found[CauseName.OTHER_PROCESS] = UNKNOWN, "cannot be known from this; it ran before"
    elif match := BEGINS.search(text):
        found[CauseName.LEAK] = EXCLUDED, f"nothing has run before {match.group().strip()!r}"
    is_other = evaluates or found.get(CauseName.LEAK, (UNKNOWN,))[0] is POSSIBLE
    if is_other and verdicts.get(CauseName.STEP, (UNKNOWN,))[0] is LIKELY:
        found[CauseName.STEP] = POSSIBLE, verdicts[CauseName.STEP][1]
    return found


_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)(?:, in (\w+))?')
_SHORT_FRAME = re.compile(r'(?:^|[ ~])((?:[A-Za-z]:)?[^\s:"~]+\.py):(\d+),? in (?:\w+\.)*(\w+)')
_LIBRARIES = re.compile(r"site-packages|dist-packages|[\\/]lib[\\/]python|<frozen ")


def _own_frames(text: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the frames, as Python or rich print them, in no library."""
    frames = _FRAME.findall(text) or _SHORT_FRAME.findall(text)
    return [frame for frame in frames if not _LIBRARIES.search(frame[0])]


def _before(text: str) -> str:
    return text[: match.start()] if (match := re.search(r"out of memory", text)) else text


def _own_line(text: str) -> list[str]:
    """Return a note with the last line of a traceback that is in no library; none without one."""
    own = _own_frames(_before(text))
    return [f"your own line that failed is {own[-1][0]}:{own[-1][1]}"] if own else []


WHAT = {
    CARD: "The memory of the card ran out.",
    BARE: "The driver got no memory, mostly the card's; this form of the message has no numbers.",
    LIBRARY: "A library failed as it does where it gets no memory for its handle or workspace.",
    CACHE: "vLLM's share of the card has no room for its cache of keys and values.",
    HOST: "The memory of the host ran out.",
    KILLED: "The process was killed, as the system does when the host's memory runs out.",
    SHARED: "The shared memory of the host (/dev/shm) ran out.",
    FOREIGN: "This is a message of TensorFlow or JAX, which memlab does not read.",
}


def _of_error(error: _Error) -> tuple[_Verdicts, list[str]]:
    if error.kind == CARD:
        return _of_card(error)
    no_shm = EXCLUDED, "the message is not that of a full /dev/shm"
    found = dict.fromkeys((CauseName.STEP, CauseName.OTHER_PROCESS), (POSSIBLE, FULL))
    found[CauseName.SHARED] = no_shm
    if error.kind == BARE:  # page-locked memory of the host fails with the same words
        if match := PINS.search(error.text):
            pins = LIKELY, f"{match.group()!r} asks for page-locked memory of the host"
            return {CauseName.SHARED: no_shm, CauseName.HOST: pins}, []
        return found, []
    if error.kind in (LIBRARY, CACHE):
        found[CauseName.HOST] = EXCLUDED, "the failed request was on the card"
        return found | (_of_cache(error) if error.kind == CACHE else _of_library(error)), []
    here: _Verdicts = dict.fromkeys(
        (CauseName.FRAGMENTATION, CauseName.LIBRARY), (EXCLUDED, "no memory of a card ran out")
    )
    if error.kind == SHARED:
        here[CauseName.SHARED] = LIKELY, "workers pass their batches through /dev/shm"
        here[CauseName.HOST] = POSSIBLE, "a host without free memory can end so too"
        return here, []
    here[CauseName.SHARED] = no_shm
    asked = error.sizes.get("requested_bytes")
    if asked:
        here[CauseName.STEP] = POSSIBLE, f"{asked} was asked for in one piece"
    if asked and asked.low > TIB:
        here[CauseName.REQUEST] = LIKELY, f"{asked} in one piece is more than most hosts have"
    level = POSSIBLE if error.kind == KILLED else LIKELY
    said = f"{asked} was refused" if asked else "the message names it"
    if error.kind == KILLED:
        said = "the system kills so; so can a person or a scheduler"
    here[CauseName.HOST] = level, said
    return here, []


def _of_cache(error: _Error) -> _Verdicts:
    """Return what vLLM's check of its share says; it counts what others hold in an own message."""
    share = "gpu_memory_utilization is the share of the card that vLLM may take"
    limit: _Verdicts = {CauseName.LIMIT: (POSSIBLE, share)}
    free, capacity = (error.sizes.get(f"{name}_bytes") for name in ("free", "capacity"))
    if not error.words.startswith("Free memory"):
        return {**limit, CauseName.OTHER_PROCESS: (UNKNOWN, "the message does not say")}
    if free and capacity and free.middle < (1 - LARGE_SHARE) * capacity.middle:
        held = f"{capacity - free} of {capacity} were held before vLLM began"
        limit |= {CauseName.OTHER_PROCESS: (LIKELY, held)}
    return {**limit, CauseName.STEP: (EXCLUDED, "nothing was loaded yet")}


def _of_library(error: _Error) -> _Verdicts:
    """Return who is likely to hold the card by how much the library takes."""
    if re.match(r"CU(?:BLAS|DNN)|[Uu]nable", error.words):
        return {CauseName.LIBRARY: (UNKNOWN, "a handle or a workspace is small beside a card")}
    own = "it asks for memory of its own, beside PyTorch's"
    if "pythonInterface" in error.words:  # where bitsandbytes pages its state to the host
        host = POSSIBLE, "a paged optimizer takes memory of the host too"
        paged = UNKNOWN, "pages of a full card move to the host"
        return {CauseName.LIBRARY: (POSSIBLE, own), CauseName.HOST: host,
                CauseName.STEP: paged, CauseName.OTHER_PROCESS: paged}  # fmt: skip
    return {CauseName.LIBRARY: (POSSIBLE, own),
            CauseName.OTHER_PROCESS: (UNKNOWN, "the message does not say")}  # fmt: skip


def _of_snapshot(snapshot: Snapshot) -> tuple[_Verdicts, list[str]]:
    """Return what the last out-of-memory of a snapshot, and its growth, decide."""
    found: _Verdicts = {}
    if snapshot.out_of_memory:
        state = snapshot.out_of_memory[-1]
        found[CauseName.FRAGMENTATION] = (LIKELY if state.is_cause else EXCLUDED, str(state))
        if state.card_had_room:
            found[CauseName.LIMIT] = LIKELY, str(state)
    if snapshot.leaks:
        leak = snapshot.leaks[0]
        growth = format_bytes(leak.bytes_per_step)
        found[CauseName.LEAK] = LIKELY, f"{leak.place} keeps {growth} more with each step"
    elif snapshot.num_steps > 3:
        steps = snapshot.num_steps
        found[CauseName.LEAK] = EXCLUDED, f"nothing grows in the {steps} steps of the snapshot"
    notes = [f"{format_bytes(held.nbytes)} of {held.category} at the peak of the snapshot: "
             f"{held.place}" for held in snapshot.peak_holdings[:3]]  # fmt: skip
    return found, [*notes, *snapshot.notes]


def _of_result(result: StepResult, sizes: Mapping[str, Range]) -> tuple[_Verdicts, list[str]]:
    """Return what the peak of the step alone says beside what was allocated."""
    peak, held = result.peak_allocated_bytes, sizes.get("allocated_bytes")
    if peak is None or held is None:
        return {}, ["the result and the message have no allocated bytes to compare"]
    said = f"the step alone peaks at {format_bytes(peak)} ({result.source}); {held} was allocated"
    if peak >= held.low:
        return {CauseName.STEP: (LIKELY, said)}, []
    rest = format_bytes(held.middle - peak)
    return {CauseName.STEP: (POSSIBLE, said)}, [f"{rest} is held by something beside the step"]


@checked()
def explain_error(
    message: str = "",
    *,
    snapshot: str | os.PathLike[str] | Snapshot | None = None,
    result: StepResult | None = None,
) -> ErrorExplanation:
    """Return which causes an out-of-memory error can have, and which it cannot.

    Args:
        message: text of a terminal; its first error that ran out of memory counts.
        snapshot: a memory snapshot of the same run, or its path.
        result: of the same workload and config, measured or predicted.

    Raises:
        MemlabError: neither a message nor a snapshot, too long a message, or no snapshot file.

    >>> import memlab
    >>> explained = memlab.explain_error(
    ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    ...     "23.69 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has "
    ...     "22.60 GiB memory in use. Of the allocated memory 12.00 GiB is allocated by PyTorch, "
    ...     "and 10.00 GiB is reserved by PyTorch but unallocated."
    ... )
    >>> explained.causes[0].name.value
    'fragmentation'
    """
    if len(message) > MOST_CHARACTERS:
        raise ConfigError(f"message has {len(message)} characters; allowed are {MOST_CHARACTERS}")
    if not message.strip() and snapshot is None:
        raise ConfigError("message='' and snapshot=None; pass the text of the error or a snapshot")
    error = _read(message)
    if error is not None and error.kind == FOREIGN:
        return ErrorExplanation(message=WHAT[FOREIGN])
    verdicts, notes = _of_error(error) if error else ({}, [])
    if error is not None:
        verdicts |= _hints(error, verdicts)
        notes = [*notes, *_own_line(error.text)]
    if snapshot is not None:
        opened = snapshot if isinstance(snapshot, Snapshot) else open_snapshot(os.fspath(snapshot))
        found, said = _of_snapshot(opened)
        verdicts, notes = verdicts | found, notes + said
    sizes = error.sizes if error else {}
    if result is not None:
        found, said = _of_result(result, sizes)
        verdicts, notes = verdicts | found, notes + said
    return ErrorExplanation(
        message=_said(error, message),
        numbers={name: size.middle for name, size in sizes.items()},
        causes=_ranked(verdicts) if verdicts else (),
        notes=tuple(notes),
    )


def _said(error: _Error | None, message: str) -> str:
    if error is not None:
        return WHAT[error.kind]
    return (
        "The text has no out-of-memory error that memlab knows."
        if message.strip()
        else "What the snapshot alone shows."
    )


def _ranked(verdicts: _Verdicts) -> tuple[ErrorCause, ...]:
    """Return every cause; what was decided first has strong reasons before plain size.

    A step is "likely" only where no more definite cause is.
    """
    complete = {cause: verdicts.get(cause, (UNKNOWN, "cannot be known from this"))
                for cause in CauseName}  # fmt: skip
    definite = [cause for cause in CauseName
                if cause is not CauseName.STEP and complete[cause][0] is LIKELY]  # fmt: skip
    if definite and complete[CauseName.STEP][0] is LIKELY:
        complete[CauseName.STEP] = POSSIBLE, complete[CauseName.STEP][1]
    order = list(Likelihood)
    ranked = sorted(complete.items(), key=lambda item: order.index(item[1][0]))
    return tuple(
        ErrorCause(name=name, verdict=verdict, why=f"{why}.".replace("..", "."), look_at=NEXT[name])
        for name, (verdict, why) in ranked
    )
