"""What holds a peak, by repeated block: "h.*.mlp.act" is the same place in every block.

A child of a numbered container counts as repeated if one of its siblings has the same parameters,
or more of them, by name. So it is read off the parameters' paths alone: modules without parameters
are seen inside repeated blocks only, and blocks in a container with other names are not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memlab.trace import Category, Holding, Phase

BY_PARAMETER = (Category.PARAMETERS, Category.OPTIMIZER_STATE)  # any operator may have made them
WORKSPACE = "library workspace"
BOTH = "buffers, workspace"
CUBLAS = tuple(
    f"aten::{name}" for name in ("addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot")
)

EMPTY = ("aten::empty", "")  # a meter does not see that this operator ran
ROUNDING = 512  # bytes, to which the allocator of a card rounds blocks up


def is_workspace(held: Holding, *, is_cuda: bool, is_tried: bool) -> bool:
    """Return whether a holding is memory of a library and no buffer of the model.

    cuBLAS keeps a workspace for each thread that has multiplied matrices (32 MiB on an H200). It
    outlives a step as the buffers of a model do, and so counts as one of them.

    Args:
        held: memory at the peak.
        is_cuda: whether it is that of a card.
        is_tried: whether the step was tried out on the card in the build. Without that only a
            constructor multiplies there, into buffers of the model. A build with both, which takes
            `init_on_meta` and such a constructor, is not told apart: all is called workspace.
    """
    is_of_step = is_tried or held.phase is not Phase.BUILD
    is_buffer = held.category is Category.BUFFERS and held.operator in CUBLAS
    return is_cuda and is_of_step and is_buffer


def is_bucket(held: Holding, *, bucketed_bytes: int) -> bool:
    """Return whether a holding is buckets in which DistributedDataParallel averages gradients.

    It makes them anew in its second forward, empty and outside of the model's modules, and keeps
    them. A loss may keep something there as well: what is larger than the gradients is not all
    buckets, and gets no name rather than a wrong one.

    Args:
        held: memory at the peak.
        bucketed_bytes: of all gradients together; 0 where no buckets are made.
    """
    is_buffer = held.category is Category.BUFFERS and held.phase is Phase.FORWARD
    is_empty = held.operator in EMPTY and not held.module
    most = bucketed_bytes + ROUNDING * held.num_blocks
    return bucketed_bytes > 0 and is_buffer and is_empty and held.nbytes <= most


def name_of_buffers(kinds: set[bool], buffers: str = "buffers") -> str:
    """Return what the category of buffers is called.

    Args:
        kinds: of each holding in it, whether it is the workspace of a library.
        buffers: the name of the category where none is.
    """
    if True not in kinds:
        return buffers
    return BOTH if False in kinds else WORKSPACE


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Holdings of one category and operator at the same place of every repeated block.

    Attributes:
        category: what they are for.
        pattern: path with "*" for the number of a repeated block.
        modules: the paths, in the order of their bytes; a single one if nothing repeats.
        operator: that allocated them; empty for parameters and optimizer state.
        num_blocks: of memory, in all of them.
        nbytes: in all of them.
        is_workspace: whether a library holds them, and not the model.
        is_bucket: whether DistributedDataParallel averages gradients in them.
    """

    category: Category
    pattern: str
    modules: tuple[str, ...]
    operator: str
    num_blocks: int
    nbytes: int
    is_workspace: bool
    is_bucket: bool

    @property
    def where(self) -> str:
        """The path, or the pattern where several paths fall under it; empty if not known."""
        return self.pattern if len(self.modules) > 1 else self.modules[0]


def group(
    holdings: Iterable[Holding],
    *,
    is_cuda: bool = False,
    is_tried: bool = False,
    bucketed_bytes: int = 0,
) -> tuple[Group, ...]:
    """Return the holdings by category, place in the repeated block and operator, largest first.

    Args:
        holdings: memory at a peak.
        is_cuda: whether it is that of a card.
        is_tried: as for `is_workspace`.
        bucketed_bytes: of the gradients that are averaged in buckets; 0 where none are made.
    """
    held = sorted(holdings, key=lambda holding: -holding.nbytes)
    pattern_of = patterns(held)
    found: dict[tuple[Category, str, str, bool, bool], list[Holding]] = defaultdict(list)
    for holding in held:
        operator = "" if holding.category in BY_PARAMETER else holding.operator
        of_library = is_workspace(holding, is_cuda=is_cuda, is_tried=is_tried)
        of_ranks = is_bucket(holding, bucketed_bytes=bucketed_bytes)
        key = holding.category, pattern_of(holding.module), operator, of_library, of_ranks
        found[key].append(holding)
    groups = [
        Group(
            category=category,
            pattern=pattern,
            modules=tuple(dict.fromkeys(holding.module for holding in members)),
            operator=operator,
            num_blocks=sum(holding.num_blocks for holding in members),
            nbytes=sum(holding.nbytes for holding in members),
            is_workspace=of_library,
            is_bucket=of_ranks,
        )
        for (category, pattern, operator, of_library, of_ranks), members in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.nbytes))


def patterns(holdings: Iterable[Holding]) -> Callable[[str], str]:
    """Return the function from a path of this model to its pattern."""
    repeated = repeated_children(h.module for h in holdings if h.category is Category.PARAMETERS)

    def pattern_of(path: str) -> str:
        parts = path.split(".")
        return ".".join(
            "*" if part.isdecimal() and ".".join(parts[: i + 1]) in repeated else part
            for i, part in enumerate(parts)
        )

    return pattern_of


def repeated_children(parameter_paths: Iterable[str]) -> frozenset[str]:
    """Return the paths of the repeated blocks of a model, by the paths of its parameters."""
    names: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in parameter_paths:
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                names[".".join(parts[:i])][part].add(".".join(parts[i + 1 :]))
    return frozenset(
        f"{container}.{child}".lstrip(".")
        for container, children in names.items()
        for child in _alike({child: frozenset(own) for child, own in children.items()})
    )


def _alike(children: dict[str, frozenset[str]]) -> list[str]:
    """Return those children that have modules within and a sibling that is like them."""
    counts: dict[frozenset[str], int] = defaultdict(int)
    for own in children.values():
        counts[own] += 1
    like = {
        own: count > 1 or any(own < other or other < own for other in counts)
        for own, count in counts.items()
    }
    return [
        child for child, own in children.items() if like[own] and any("." in name for name in own)
    ]


def blocks_pattern(holdings: Sequence[Holding]) -> str:
    """Return the pattern of the repeated blocks that hold most parameters; empty without any.

    Of patterns with equally many, the one of most blocks: as `checkpointing='blocks'` chooses.
    """
    pattern_of = patterns(holdings)
    sizes: dict[str, int] = defaultdict(int)
    members: dict[str, set[str]] = defaultdict(set)
    for holding in holdings:
        if holding.category is Category.PARAMETERS:
            path, pattern = holding.module.split("."), pattern_of(holding.module).split(".")
            for end, part in enumerate(pattern, start=1):
                if part == "*":
                    sizes[".".join(pattern[:end])] += holding.nbytes
                    members[".".join(pattern[:end])].add(".".join(path[:end]))
    return max(sizes, key=lambda name: (sizes[name], len(members[name])), default="")
