"""The choices in the panel's header: workloads, devices here, cards elsewhere, and a limit."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memlab import workloads
from memlab._panel.job import Latest
from memlab._panel.questions import Question
from memlab._util.functions import is_same_function
from memlab._util.units import KIB, parse_bytes, shown
from memlab.config import BudgetEngine, Checkpointing, StepConfig
from memlab.devices import cards, clusters
from memlab.devices.here import describe, resolve_device
from memlab.errors import ConfigError, MemlabError, WorkloadError
from memlab.store.recorded import is_recorded, record_of, recordings
from memlab.techniques import registry
from memlab.workload import FUNCTIONS, Value, Workload, have_same_values
from memlab.workloads.quantizing import QUANTIZED

OTHER, OTHER_TEXT = "other", "another card, by memory size"


def offered_workloads(given: Workload | None) -> dict[str, Workload]:
    """Return workloads by name: the given one first, then the zoo.

    Raises:
        WorkloadError: the argument is not a workload.
    """
    if given is not None and not isinstance(given, Workload):
        raise WorkloadError(
            f"workload={given!r} is not a Workload; pass memlab.workloads.get('gpt-small'), or "
            "Workload.from_module(module, example_batch, loss_fn)"
        )
    first = {given.name: given} if given else {}
    instead = given.base_name if given else None  # of the same in its own size
    return first | {n: workloads.get(n) for n in workloads.names() if n != instead}


def zoo_options(workload: Workload) -> dict[str, Any] | None:
    """Return the options that make this workload of the zoo, or None if it is not of the zoo.

    Its name in the zoo is its `base_name`. One of whose functions a person has replaced is not.
    """
    spec = getattr(workload.build_model, "__self__", None)
    known = workloads.SPECS.get(workload.base_name)
    if spec is None or known is None or type(spec) is not type(known):
        return None

    made = spec.workload(workload.name)
    if not all(is_same_function(getattr(workload, f), getattr(made, f)) for f in FUNCTIONS):
        return None
    return {
        name: getattr(spec, name)
        for name in (field.name for field in dataclasses.fields(known))
        if getattr(spec, name) != getattr(known, name)
    }


def quantized_base(workload: Workload) -> str | None:
    """Return the number format of a fine-tuning's base, if that is quantized."""
    base = workload.choices.values.get("base") if workload.choices else None
    return str(base) if base in QUANTIZED else None


def devices(chosen: str) -> list[tuple[str, str, str]]:
    """Return label, name and group of each device: here, cards and clusters, recorded ones.

    Args:
        chosen: a name that is always included.
    """
    fastest = resolve_device(None)
    names = []
    if fastest.type != "cpu":
        count = torch.accelerator.device_count()
        names = [f"{fastest.type}:{i}" for i in range(count)]

    shown = [(f"this machine: {n} ({describe(torch.device(n))})", n, "") for n in names]
    shown.append(("this machine: cpu", "cpu", ""))
    for group, members in {**cards.groups(), "several cards": clusters.names()}.items():
        shown += [(*offered_card(name), group) for name in members]
    shown += [(f"{record.title}, recorded", record.label, "recorded") for record in recordings()]
    if chosen not in (name for _, name, _ in shown):
        shown.append((*offered_card(chosen), ""))

    return [*shown, (OTHER_TEXT, OTHER, "")]


def offered_card(name: str) -> tuple[str, str]:
    """Return the label and the name of a card that is not in this machine."""
    return f"{name}, predicted", name


def compared_cards() -> tuple[str, ...]:
    """Return the cards that the table puts side by side; each is predicted when it is opened."""
    return tuple(card.name for card in cards.compared())


def name_of(device: Any) -> str:
    """Return the name of a device in results, be it here, elsewhere or recorded.

    Raises:
        DeviceError: the name is unknown.
    """
    return record_of(device).label if is_recorded(device) else cards.resolve(device).name


def num_cards(device: str) -> int | None:
    """Return how many cards a cluster has; None for what is none.

    Raises:
        DeviceError: there are no such machines.
    """
    found = None if is_recorded(device) else cards.resolve(device).cluster
    return found.num_devices if found else None


def of_capacity(device: str) -> str:
    """Return whose memory `capacity` is: "this machine" or "the card"."""
    return "this machine" if device == "cpu" else "the card"


def limit_text(memory_limit: int | str | None) -> str:
    """Return the text of the limit box.

    Raises:
        ConfigError: the text is not a size.
    """
    if memory_limit is None or (isinstance(memory_limit, str) and not memory_limit):
        return ""

    size = parse_bytes(memory_limit)
    if isinstance(memory_limit, str):
        return memory_limit.strip()

    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = KIB ** ("KMGT".index(unit[0]) + 1)
        if size % factor == 0:
            return f"{size // factor} {unit}"

    return f"{size} B"


def checked(fields: dict[str, Any], workload_names: list[str]) -> dict[str, Any]:
    """Return the values to which the header's controls are set.

    Raises:
        MemlabError: a value is not allowed; the message says what is.
    """
    found = dict(fields)
    if "workload" in fields and fields["workload"] not in workload_names:
        raise WorkloadError(
            f"workload={fields['workload']!r} is not in the panel; allowed is one of "
            f"{workload_names}, or a new memlab.panel(workload)"
        )

    if "device" in fields:
        found["device"] = name_of(fields["device"])
    if "memory_limit" in fields:
        found["memory_limit"] = limit_text(fields["memory_limit"])
    if not isinstance(fields.get("check_gradients", False), bool):
        raise ConfigError(
            f"check_gradients={fields['check_gradients']!r}; allowed is True or False"
        )

    return found


# `MadeChoices`: workloads with other choices, each made once. No widgets.

Chosen = tuple[str, tuple[tuple[str, Value], ...]]  # the name of a workload, and choices


class MadeChoices:
    """Makes workloads with other choices, and keeps them.

    Args:
        workloads: by name; those that are made are added.
    """

    def __init__(self, workloads: dict[str, Workload]) -> None:
        self._workloads = workloads
        self._found: dict[Chosen, Workload | str] = {}  # or why there is none

    def get(self, listed: Workload, values: Mapping[str, Value]) -> Workload:
        """Return a workload of the list with these choices.

        Raises:
            WorkloadError: it cannot have them.
        """
        if listed.choices is not None and dict(listed.choices.values) == values:
            return listed

        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        try:
            key = listed.name, tuple(values.items())
            hash(key)
        except TypeError:  # of a kind that no control can show
            raise WorkloadError(
                f"choices={shown(values)}; allowed is a text, an int, True, False or None for each "
                "name, or a list of texts"
            ) from None
        if key not in self._found:
            try:
                self._found[key] = self._kept(listed.chosen(**values))
            except WorkloadError as error:
                self._found[key] = str(error)
        found = self._found[key]
        if isinstance(found, str):
            raise WorkloadError(found)
        return found

    def _kept(self, made: Workload) -> Workload:
        """Return the workload of this name, which may be on screen and have been predicted."""
        kept = self._workloads.setdefault(made.name, made)
        if kept is not made and (
            made.choices is None or not have_same_values(kept.choices, made.choices)
        ):
            raise WorkloadError(
                f"make_workload gives another choice the same name, {made.name}; let the name say "
                "the choices"
            )
        return kept

    def checked(self, listed: Workload, values: Any, on_screen: Mapping[str, Value]) -> Workload:
        """Return a workload with choices that code asks for; None for its own.

        Args:
            listed: a workload of the list.
            values: some choices by name.
            on_screen: those of the others; empty for those of the workload itself.

        Raises:
            WorkloadError: they are no choices by name, or the workload cannot have them.
        """
        if values is None:
            return listed
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise WorkloadError(
                f"choices={shown(values)}; allowed is a dict of choices by name, such as "
                "{'rank': 32}, or None for those of the workload itself"
            )
        own = listed.choices.values if listed.choices else {}
        return self.get(listed, {**own, **on_screen, **values}) if values else listed


# `MadeSizes`: workloads in other sample sizes, made in a thread.
#
# A person's own `make_workload` may take seconds, and a page that waits for it moves no
# slider. So the page looks at what is made, and hears of the rest; only code waits. No
# widgets.

PATIENCE_SECONDS = 0.05  # the page waits so long, so that nothing flickers where making is quick

Size = tuple[str, Any]  # the name of a workload, and a size that may yet be refused
CLOSED = "the panel was closed before the workload was made in this size"


class MadeSizes:
    """Makes workloads in other sizes, one at a time, and keeps them.

    What code waits for comes first, then what is on screen, then its neighbours.

    Args:
        workloads: by name; those that are made are added.
        arrived: called in another thread once the size on screen is made, and after the last of its
            neighbours.
    """

    def __init__(self, workloads: dict[str, Workload], arrived: Callable[[], None]) -> None:
        self._workloads = workloads
        # not by the thread that makes: whoever is told may look, and hold what others wait for
        self._arrived = Latest(lambda _: arrived())
        self._condition = threading.Condition()
        self._found: dict[Size, Workload | str] = {}  # or why there is none
        self._waited: list[Size] = []  # by code
        self._shown: Size | None = None
        self._shown_since = 0.0
        self._neighbours: list[Size] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def get(self, given: Workload, size: Any) -> Workload:
        """Return a workload in this size, and wait until it is made.

        For code alone: nothing that the page's lock is held for may wait here.

        Raises:
            WorkloadError: it cannot be made, or the panel was closed.
        """
        if _is_own(given, size):
            return given

        key = given.name, size
        with self._condition:
            self._waited.append(key)
            self._wake()
            try:
                self._condition.wait_for(lambda: key in self._found or self._closed)
            finally:
                self._waited.remove(key)
            return self._known(key)

    def look(self, given: Workload, size: Any) -> Workload | None:
        """Return the workload on screen; None while it is being made, of which `arrived` tells.

        Raises:
            WorkloadError: it cannot be made, or the panel was closed.
        """
        if _is_own(given, size):
            return given

        key = given.name, size
        with self._condition:
            if self._shown != key:
                self._shown, self._shown_since = key, time.monotonic()
                self._neighbours = []
                self._wake()
            patience = self._shown_since + PATIENCE_SECONDS - time.monotonic()
            is_over = self._condition.wait_for(
                lambda: key in self._found or self._closed, max(patience, 0.0)
            )
            return self._known(key) if is_over else None

    def made(self, given: Workload, sizes: Sequence[int]) -> list[Workload]:
        """Return those of these sizes that are made, in their order; make the others meanwhile."""
        with self._condition:
            own = [size for size in sizes if _is_own(given, size)]
            others = [size for size in sizes if size not in own]
            self._neighbours = [
                (given.name, size) for size in others if (given.name, size) not in self._found
            ]
            self._wake()
            found = [
                given if size in own else self._found.get((given.name, size)) for size in sizes
            ]
        return [one for one in found if isinstance(one, Workload)]

    def close(self) -> None:
        """End the thread after what it makes; whoever waits hears that the panel was closed."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._arrived.close()

    def _known(self, key: Size) -> Workload:
        found = self._found.get(key, CLOSED)
        if isinstance(found, str):
            raise WorkloadError(found)
        return found

    @property
    def _next(self) -> Size | None:
        """What is to be made next."""
        wanted = [*self._waited, *([self._shown] if self._shown else []), *self._neighbours]
        return next((key for key in wanted if key not in self._found), None)

    def _wake(self) -> None:
        if self._thread is None and not self._closed and self._next is not None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._condition:
                key = None if self._closed else self._next
                if key is None:
                    self._thread = None
                    return
                given = self._workloads[key[0]]

            try:
                found: Workload | str = given.resized(key[1])
            except MemlabError as error:
                found = str(error)
            except BaseException as error:  # such as a person's sys.exit(); somebody waits
                found = f"{given.name} cannot be made in size {key[1]}: {type(error).__name__}"

            with self._condition:
                self._found[key] = found
                if isinstance(found, Workload):
                    self._workloads[found.name] = found
                is_awaited = key in (self._shown, *self._neighbours[-1:])
                self._condition.notify_all()
            if is_awaited and not self._closed:
                self._arrived()


def _is_own(given: Workload, size: Any) -> bool:
    """Return whether samples of a workload have this size already; None stands for their own."""
    own = given.sample_size
    return size is None or (own is not None and size == own.value)


# The settings next to the ones on screen, one of which a person is likely to ask for next.
#
# They are predicted ahead while nothing else is asked for, so that the picture is there
# when a slider moves. Pure functions of the settings; `questions.py` decides when they are
# predicted.

BUDGET_STEP = 0.05  # between two positions of its slider; on the other two each is the double
LARGEST = {"batch_size": 2**10, "accumulation_steps": 2**6, "world_size": 2**12}  # of their sliders
SIZE = "workload_name"  # a workload with samples of another size has another name
SLIDERS = ("memory_budget", "accumulation_steps", SIZE, "batch_size", "world_size")
FARTHEST = 2  # positions from the one on screen


def positions(field: str) -> Sequence[float]:
    """Return the positions of a slider: 1, 2, 3, 4, 6, 8, ..., of ranks only the powers of two."""
    if field == "memory_budget":
        return [round(at * BUDGET_STEP, 2) for at in range(round(1 / BUDGET_STEP) + 1)]
    powers = [2**power for power in range(LARGEST[field].bit_length())]
    between = [3 * power for power in powers if 3 * power < LARGEST[field]]
    return sorted(powers if field == "world_size" else [*powers, *between])


RECORDED = (1, 2, 3)  # micro-batches: a recording of three gives every larger number of them
SOME_BUDGET = 0.5


def covering(config: StepConfig) -> Iterator[StepConfig]:
    """Yield configs whose recordings cover what that of a config leaves open."""
    parts = config.data_parallel_size
    for steps in sorted({*RECORDED} - {min(config.accumulation_steps, max(RECORDED))}):
        batch = max(config.batch_size // (parts * steps), 2) * parts * steps
        yield dataclasses.replace(config, batch_size=batch, accumulation_steps=steps)
    is_eager = not config.compile and config.checkpointing is Checkpointing.NONE
    if is_eager and config.budget_engine is BudgetEngine.EAGER and parts == 1:
        yield dataclasses.replace(
            config, memory_budget=1.0 if config.memory_budget < 1.0 else SOME_BUDGET
        )


def neighbours(
    question: Question,
    precisions: Sequence[str],
    before: Question | None = None,
    sizes: Sequence[str] = (),
) -> list[Question]:
    """Return the settings that are one move of one control away, the likeliest first.

    A hand stays with the slider that it moved last, so the neighbours of that one come first. Of
    the others the near positions come before the far ones, and precisions come last. Settings that
    a technique refuses are left out.

    Args:
        question: the settings on screen.
        precisions: that the panel offers.
        before: the settings that were on screen before; None if there were none.
        sizes: the names of the workload in its sample sizes, ascending; empty if it has no others.
    """
    moved = [name for name in SLIDERS if before and _is_moved(name, before, question, sizes)]
    changes: list[tuple[str, Any]] = []
    for names in (moved, [name for name in SLIDERS if name not in moved]):
        for distance in range(1, FARTHEST + 1):
            for name in names:
                values = _at(question, name, distance, sizes)
                changes += [(name, value) for value in values]

    changes += [("precision", precision) for precision in precisions]
    changed = (_changed(question, name, value) for name, value in changes)
    kind = "cpu" if question.device == "cpu" else "cuda"
    return [
        one
        for one in changed
        if one is not None and one != question and not registry.is_refused(one.config, kind)
    ]


def _changed(question: Question, name: str, value: Any) -> Question | None:
    """Return the question after a change; None if no config is like this.

    Every micro-batch needs a sample, and ranks divide a batch into equal parts.
    """
    if name == SIZE:
        return dataclasses.replace(question, workload_name=value)
    try:
        config = dataclasses.replace(question.config, **{name: value})
    except ConfigError:
        return None
    return dataclasses.replace(question, config=config)


def _at(question: Question, name: str, distance: int, sizes: Sequence[str]) -> Iterator[Any]:
    """Yield the two positions of a slider at this distance, the lower one first."""
    if name == SIZE:
        yield from _sizes_at(question, distance, sizes)
        return

    value = getattr(question.config, name)
    for sign in (-1, 1):
        if name == "memory_budget":
            budget = round(value + sign * distance * BUDGET_STEP, 2)
            if 0.0 <= budget <= 1.0:
                yield budget
        else:
            size = value * 2**distance if sign > 0 else value // 2**distance
            if 1 <= size <= LARGEST[name]:
                yield size


def _sizes_at(question: Question, distance: int, sizes: Sequence[str]) -> Iterator[str]:
    if question.workload_name in sizes:
        here = sizes.index(question.workload_name)
        for position in (here - distance, here + distance):
            if 0 <= position < len(sizes):
                yield sizes[position]


def _is_moved(name: str, before: Question, question: Question, sizes: Sequence[str]) -> bool:
    if name == SIZE:
        return before.workload_name != question.workload_name and before.workload_name in sizes
    return bool(getattr(before.config, name) != getattr(question.config, name))
