"""What a script checkpoints: the same modules that keep the same outputs, by torch's own calls.

Left out, of what `recompute.py` takes care of: state of NumPy's and Python's random numbers and
plain attributes that a forward changes. A buffer that a forward reads and changes is recomputed
from its changed value; running statistics, which training does not read, are exact.
"""

from memlab._util.units import quoted
from memlab.config import PRESET_POLICIES, Checkpointing, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.checkpointing import blocks, policies, recompute
from memlab.techniques.checkpointing.policies import by_preset, can_be_kept, values_of
from memlab.techniques.compilation import is_compiled
from memlab.techniques.source import LONGEST_LINE, ScriptLines, inlined, together
from memlab.techniques.technique import Plan, Setup

IMPORTS = (
    "import contextlib",
    "import functools",
    "import inspect",
    "from torch.utils.checkpoint import checkpoint",
)
OF_POLICIES = (
    "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts",
)

CHECKPOINTED = '''
HOW = {"use_reentrant": False}
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    HOW["respect_saved_tensors_hooks"] = False  # what is kept stays on the device in every torch


@contextlib.contextmanager
def again(block, context):
    """Run a recompute, which must not update running statistics a second time."""
    every = [(m, name, b) for m in block.modules() for name, b in m._buffers.items()]
    held = [(module, name, buffer) for module, name, buffer in every if buffer is not None]
    for module, name, buffer in held:
        module._buffers[name] = buffer.clone()
    try:
        with context:
            yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def checkpointed(block, contexts=None):
    """Drop the activations of a block in forward and compute them again in backward."""
    forward = functools.partial(with_its_end, block.forward)

    def context_fn():
        none = (contextlib.nullcontext(), contextlib.nullcontext())
        first, second = contexts() if contexts else none
        return first, again(block, second)

    def run(*args, **kwargs):
        return checkpoint(forward, *args, context_fn=context_fn, **HOW, **kwargs)

    block.forward = run
'''.strip()

COMPILED = '''
def checkpointed(block):
    """Drop the activations of a block in forward and compute them again in backward."""
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
'''.strip()

KEEPING = '''
def keeping():
    """Return contexts that keep what a policy says; a new pair for each call of a block."""

    def policy(context, func, *args, **kwargs):
        named = {rule}
        keep = named and can_be_kept(func, values_of(func, args, kwargs))
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''.strip()

PLANNED = '''
def keeping(planned):
    """Return contexts that keep what a plan says: operators by their number in one call."""
    counts = Counter()

    def policy(context, func, *args, **kwargs):
        key = str(func), counts[context.is_recompute, func]
        counts[context.is_recompute, func] += 1
        return CheckpointPolicy.MUST_SAVE if key in planned else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''.strip()


WHY = "# activations inside of these blocks are freed in forward and computed again in backward"
PLAN_WHY = "# of each of these modules only the named outputs are kept; the rest is computed again"


def source(setup: Setup) -> ScriptLines:
    """Return what a script checkpoints.

    Raises:
        UnsupportedError: the policy is a function, whose source memlab does not have.
    """
    config, plan = setup.config, setup.plan
    if plan is not None:
        return _of_plan(plan)
    if config.checkpointing is Checkpointing.NONE:
        return ScriptLines()
    files, chosen = _chosen(config.checkpoint_modules)
    if is_compiled(config):
        lines = ScriptLines(
            imports=("import functools", IMPORTS[-1]),
            functions=(COMPILED,),
            model=(WHY, f"for block in {chosen}:", "    checkpointed(block)"),
        )
        return together([files, lines])
    keeping = _policy(config)
    lines = ScriptLines(
        imports=IMPORTS,
        functions=(CHECKPOINTED,),
        model=(
            WHY,
            f"for block in {chosen}:",
            f"    checkpointed(block{', keeping' if keeping.functions else ''})",
        ),
    )
    return together([inlined(recompute.with_its_end), files, keeping, lines])


def _chosen(which: str) -> tuple[ScriptLines, str]:
    """Return the files that a text for modules needs, and the expression that selects them."""
    every = policies.EVERY.fullmatch(which)
    if which != policies.AUTO and not every:
        return inlined(blocks.find_named), f"find_named(model, {quoted(which)}).values()"
    found = "find_blocks(model).values()"
    chosen = f"list({found})[::{every[1]}]" if every else found
    return inlined(blocks.find_blocks), chosen


def _policy(config: StepConfig) -> ScriptLines:
    """Return the functions that say what a block keeps; none where it keeps nothing."""
    policy = config.checkpoint_policy
    if policy == "recompute-all":
        return ScriptLines()
    if not isinstance(policy, str):
        raise UnsupportedError(
            f"checkpoint_policy={policy!r} cannot be written into a script: memlab does not have "
            "the source of your function; name operators ('aten.mm, aten.addmm') or a preset"
        )
    if policy in PRESET_POLICIES:
        rule = f'by_preset("{policy}", func, 0, args, kwargs, None)'
        keeping = ScriptLines(imports=OF_POLICIES, functions=(KEEPING.format(rule=rule),))
        return together([inlined(can_be_kept, values_of, by_preset), keeping])
    overloads = sorted(str(overload) for overload in policies.overloads(policy))
    kept = "\n".join(["KEPT = {", *(f"    torch.ops.{name}," for name in overloads), "}"])
    keeping = ScriptLines(
        imports=OF_POLICIES, functions=(kept, KEEPING.format(rule="func in KEPT"))
    )
    return together([inlined(can_be_kept, values_of), keeping])


def _of_plan(plan: Plan) -> ScriptLines:
    regions = []
    for region in plan.regions:
        kept = [f"({quoted(operator)}, {index})" for operator, index in sorted(region.keep)]
        line = f"    {quoted(region.path)}: {{{', '.join(kept)}}},"
        if len(line) > LONGEST_LINE:
            line = "\n        ".join([f"    {quoted(region.path)}: {{", *(f"{k}," for k in kept)])
            line += "\n    },"
        regions.append(line if kept else f"    {quoted(region.path)}: None,")
    lines = ScriptLines(
        imports=(
            *IMPORTS,
            "from collections import Counter",
            *OF_POLICIES,
        ),
        functions=("\n".join(["PLAN = {", *regions, "}"]), PLANNED, CHECKPOINTED),
        model=(
            PLAN_WHY,
            "for path, kept in PLAN.items():",
            "    contexts = functools.partial(keeping, kept) if kept else None",
            "    checkpointed(model.get_submodule(path), contexts)",
        ),
    )
    return together([inlined(recompute.with_its_end), lines])
