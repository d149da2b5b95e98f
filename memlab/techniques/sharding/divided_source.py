"""The lines of a script whose ranks divide layers, as a trial of the model has found them.

The script makes no trial: it holds what was found, and the files that divide by it.
"""

from collections.abc import Mapping

from memlab.arguments.quoting import quoted
from memlab.config import Sharding, StepConfig
from memlab.errors import UnsupportedError
from memlab.techniques.sharding.ranks import REPLICATED, is_tensor_parallel
from memlab.techniques.source import PLACE, ScriptLines, together, whole
from memlab.techniques.technique import Setup
from memlab.torch_private import sent_parts

TABLE = "# how ranks divide each layer, and along which dimension of its weight; * is any number"
SAME = "# all ranks compute the same samples, and each its part of these layers"
SAME_OF_FEW = "# every {} ranks compute the same samples, and each its part of these layers"
AS_ONE = "# ranks that divide layers compute the same samples, so here they count as one"
ALIKE = "# tensors that all ranks have alike, such as masks, meet divided ones"
COPIES = "# the ranks that hold the same parts average their gradients while backward goes on"
ATTENTION = "register_attention()  # for which PyTorch has no rule on a CPU"


def source(asked: Setup, mesh: str) -> ScriptLines:
    """Return what a script needs for divided layers; nothing if ranks do not divide any.

    Args:
        asked: with the layers.
        mesh: the expression that makes the mesh of all ranks.
    """
    config = asked.config
    if not is_tensor_parallel(config):
        return ScriptLines()
    if asked.layers is None:
        raise UnsupportedError(
            f"{said(config)} has no script of its settings alone, because which layers are divided "
            "depends on the model; use memlab.export_script"
        )
    # late, since these import much of torch.distributed
    from memlab.techniques.sharding import divided_attention, divided_layers, local_parts

    is_copied, is_cpu = config.sharding in REPLICATED, asked.device.type == "cpu"
    sends_updated = config.sharding is Sharding.ZERO1
    files = [divided_layers, *[divided_attention] * is_cpu, *[local_parts] * is_copied]
    files += [sent_parts] * sends_updated
    is_all = config.sharding is Sharding.TENSOR
    why = SAME if is_all else SAME_OF_FEW.format(config.tensor_parallel_size)
    lines = ScriptLines(
        imports=(
            "from torch.distributed.device_mesh import init_device_mesh",
            "from torch.distributed.tensor.experimental import implicit_replication",
        ),
        functions=(_table(asked.layers),),
        place=(
            PLACE,
            *[ATTENTION] * is_cpu,
            why,
            f"ranks = {mesh}",
            'divide_layers(model, ranks["tensor"], DIVIDED_LAYERS)',
        ),
        optimizer=("parts_sent_by(optimizer)",) if sends_updated else (),
        around=(*["local_parts.used()"] * is_copied, ALIKE, "implicit_replication()"),
    )
    return together([whole(*files), lines])


def replicated_lines() -> ScriptLines:
    """Return the lines that average the gradients of those ranks that hold the same parts."""
    return ScriptLines(
        model=(
            COPIES,
            'group = ranks["replicate"].get_group()',
            "local_parts = LocalParts(model)",
            "with local_parts.shown():",
            "    model = replicate(model, group)",
        )
    )


def who(config: StepConfig) -> tuple[str, ...]:
    """Return the lines that say which part of a batch a rank computes, of how many."""
    if config.sharding is Sharding.TENSOR:
        return ()
    number, count = "dist.get_rank()", "dist.get_world_size()"
    if not is_tensor_parallel(config):
        return (f"rank, num_ranks = {number}, {count}",)
    size = config.tensor_parallel_size
    return (AS_ONE, f"rank, num_ranks = {number} // {size}, {count} // {size}")


def said(config: StepConfig) -> str:
    """Return the settings that divide layers, as the beginning of a sentence."""
    strategy = f"sharding={str(config.sharding)!r}"
    if config.sharding is Sharding.TENSOR:
        return strategy
    return f"{strategy}, tensor_parallel_size={config.tensor_parallel_size}"


def _table(layers: Mapping[str, tuple[str, int | None]]) -> str:
    rows = [
        f"    {quoted(path)}: ({quoted(role)}, {dim!r})," for path, (role, dim) in layers.items()
    ]
    return "\n".join([TABLE, "DIVIDED_LAYERS = {", *rows, "}"])
