"""Gets answers from a tool: in its own environment, in a process of its own, with a time limit.

A tool that hangs, dies or cannot be installed is said so, row by row; the others go on.
"""

import ast
import json
import os
import queue
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent / "tools"
RUNNER = Path(__file__).with_name("runner.py")
PREFIX = "by_"
SECONDS_FOR_ONE = 180.0  # of an answer; the first one imports the tool too
PACKAGES = {
    "public": ("torchvision==0.21.0", "transformers==4.51.3", "tokenizers==0.21.1",
               "huggingface_hub==0.30.2"),
    "litgpt": ("litgpt==0.4.9",),
}  # fmt: skip
"""What rows of `gpu_peaks` and of `litgpt_hub` ran: memlab records the same code."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool, as its file in `tools/` says.

    Attributes:
        name: as the table has it.
        file: that asks it.
        needs: packages that pip installs for it; empty for one that runs in this environment.
        means: what its number is, in words.
        own_fits: whether it says itself what fits; else its number is compared with the card.
    """

    name: str
    file: Path
    needs: tuple[str, ...]
    means: str
    own_fits: bool


def tools(names: Sequence[str] = ()) -> list[Tool]:
    """Return the tools of these names, or all.

    Raises:
        ValueError: there is no such tool.
    """
    found = {tool.name: tool for tool in map(_tool, sorted(TOOLS.glob(f"{PREFIX}*.py")))}
    for name in names:
        if name not in found:
            raise ValueError(f"no tool {name!r}; there are {', '.join(found)}")
    return [found[name] for name in names or found]


def _tool(file: Path) -> Tool:
    """Read a file's constants without importing it, since its packages are not here."""
    said: dict[str, Any] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("NAME", "NEEDS", "MEANS", "OWN_FITS"):
                said[name] = ast.literal_eval(node.value)
    return Tool(
        name=said["NAME"], file=file, needs=tuple(said["NEEDS"]), means=said["MEANS"],
        own_fits=said["OWN_FITS"],
    )  # fmt: skip


def with_packages(folder: Path) -> None:
    """Put what the public runs used into folders of their own, without what it depends on, once."""
    for name, needs in PACKAGES.items():
        if not (folder / name).is_dir():
            _pip(sys.executable, "--no-deps", "--target", str(folder / name), *needs)


def _pip(python: str | Path, *what: str) -> None:
    """Install packages.

    Raises:
        OSError: it failed; the message is the end of what pip said.
    """
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"pip install {' '.join(what)}: {done.stderr.strip()[-300:]}")


def installed(tool: Tool, folder: Path) -> str:
    """Return the Python that runs a tool; its environment is made once.

    Args:
        tool: to be run.
        folder: with the environments.

    Raises:
        OSError: it cannot be installed; the message is the end of what pip said.
    """
    if not tool.needs:
        return sys.executable
    home = folder / tool.file.stem.removeprefix(PREFIX)
    python, mark = home / "bin" / "python", home / "needs.json"
    if mark.exists() and json.loads(mark.read_text()) == list(tool.needs):
        return str(python)
    venv.create(home, clear=True, with_pip=True)
    _pip(python, *tool.needs)
    mark.write_text(json.dumps(tool.needs))
    return str(python)


def answers(
    tool: Tool, settings: Sequence[dict[str, Any]], folder: Path, limit: float = SECONDS_FOR_ONE
) -> Iterator[Answer]:
    """Yield an answer for each setting, in their order.

    Args:
        tool: that is asked.
        settings: as `Row.setting`.
        folder: with the environments; what a tool says goes into a file there.
        limit: seconds for one answer.
    """
    try:
        python = installed(tool, folder)
    except OSError as error:
        for setting in settings:
            yield {"number": setting["number"], "cannot": f"not installed: {error}"}
        return
    left = list(settings)
    while left:
        for said in _until_it_fails(tool, python, list(left), folder, limit):
            left.pop(0)
            yield said


def _until_it_fails(
    tool: Tool, python: str, settings: Sequence[dict[str, Any]], folder: Path, limit: float
) -> Iterator[Answer]:
    """Yield answers until the process has said all, hangs or dies; the last one says that."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{tool.file.stem}.log").open("a") as log:
        process = subprocess.Popen(
            [python, str(RUNNER), str(tool.file)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, env=os.environ | OFFLINE, cwd=folder,
        )  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdin is not None
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            for setting in settings:
                process.stdin.write(json.dumps(setting) + "\n")
                process.stdin.flush()
                line = lines.get(timeout=limit)
                if not line:
                    raise BrokenPipeError
                yield json.loads(line)
        except queue.Empty:
            yield {"number": setting["number"], "cannot": f"no answer in {limit:.0f} s"}
        except BrokenPipeError:
            yield {"number": setting["number"],
                   "cannot": f"its process ended with status {process.wait()}"}  # fmt: skip
        finally:
            process.kill()
            process.wait()


def _read(stream: Any, lines: "queue.Queue[str]") -> None:
    for line in stream:
        lines.put(line)
    lines.put("")
