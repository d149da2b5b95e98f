"""`run_script`: what a person's own script would hold, found by running it over fake tensors."""

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab._util.checks import checked, count, seconds, size
from memlab._util.units import shown
from memlab.config import StepConfig
from memlab.devices.here import versions_here
from memlab.errors import ConfigError
from memlab.prediction.run_result import RunResult
from memlab.result import Source
from memlab.running import Ended
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import OnProgress, run
from memlab.store.recorded import target_for
from memlab.tracing.person_script import Script

KINDS = (".py", ".ipynb")


@checked(memory_limit=size, timeout_seconds=seconds, steps=count(1), nproc_per_node=count(0))
@shows_progress
def run_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    device: str | None = None,
    *,
    is_module: bool = False,
    steps: int = 3,
    nproc_per_node: int = 0,
    memory_limit: int | str | None = None,
    writes: bool = False,
    timeout_seconds: float = 600,
    on_progress: OnProgress | None = None,
    progress: bool = True,
    cancel: threading.Event | None = None,
) -> RunResult:
    """Run a person's script, unchanged, without its card; return what it would hold, by stages.

    The script runs in a worker over tensors without memory. It finds the card under the name "cuda"
    and, where it needs more than there is, PyTorch's own error. Values that only a real run has,
    such as that of a loss, are assumed, and `notes` say which lines read them. Loops over a loader
    end once they have shown what they do, so that evaluation and saving come after a few updates.

    Args:
        path: of the script, or of a notebook, whose code cells are run; with `is_module` the name
            of a module, as for `python -m`.
        arguments: of the script.
        device: as for `memlab.predict`.
        is_module: whether `path` is the name of a module.
        steps: updates of its optimizers after which a training loop has shown what it does.
        nproc_per_node: ranks as which `torchrun` would start the script. It runs as the first of
            them, in a process group whose collectives move nothing. 0 is without `torchrun`.
        memory_limit: bytes, or text such as "2GiB": the script finds no more on its card, and on a
            CPU each stage is compared with it. None is what PyTorch can reserve on the card.
        writes: whether the script may write its files. Without it they go to a folder that is
            removed with the run, where the script itself finds them.
        timeout_seconds: the run ends as `timed_out` after this time.
        on_progress: as for `memlab.measure`.
        progress: as for `memlab.measure`.
        cancel: as for `memlab.measure`.

    Raises:
        MemlabError: there is no such file, or an argument is not allowed. What goes wrong in the
            script is the `outcome` of the result.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "train.py"
    ...     _ = file.write_text("import torch; x = torch.empty(2**20, device='cuda')")
    ...     found = run_script(file, device="rtx-4090")
    >>> str(found.lines[0]), found.peak_allocated_bytes
    ('train.py:1', 4194304)
    """
    script = replace(
        script_of(path, arguments, is_module=is_module),
        steps=steps, writes=writes, ranks=nproc_per_node,
    )  # fmt: skip
    target = target_for(device, StepConfig())
    limit: Any = memory_limit
    if limit is None and target.card is not None:
        limit = target.card.usable_bytes
    try:
        with tempfile.TemporaryDirectory(prefix="memlab-run-") as home:  # also if it is killed
            asked: dict[str, Any] = {
                "script": replace(script, home=home), "target": target, "memory_limit": limit,
            }  # fmt: skip
            found: RunResult = run(
                "predict_script", asked, timeout_seconds=timeout_seconds, on_progress=on_progress,
                cancel=cancel,
            )  # fmt: skip
    except Ended as ended:
        return RunResult(
            outcome=ended.outcome,
            message=str(ended),
            source=Source.PREDICTED,
            device=target.name,
            versions=versions_here(),
            config=None,
            run=None,
            workload_name=Path(script.path).name,
            memory_limit_bytes=limit,
        )
    return found


def script_of(
    path: str | os.PathLike[str], arguments: Sequence[str], *, is_module: bool = False
) -> Script:
    """Return a script as it is run.

    Raises:
        ConfigError: there is no such file.
    """
    name = os.fspath(path)
    file = Path(name)
    if not is_module and file.suffix not in KINDS:
        raise ConfigError(
            f"path={shown(name)} is no script; allowed is a file that ends in .py or .ipynb"
        )
    if not is_module and not file.is_file():
        raise ConfigError(f"path={shown(name)} is not there; give the path of a file")
    return Script(
        path=name if is_module else str(file.resolve()),
        arguments=tuple(map(str, arguments)),
        is_module=is_module,
    )
