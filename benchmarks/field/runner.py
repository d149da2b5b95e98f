"""Runs in a tool's own environment: reads settings, one JSON a line, and writes the tool's answers.

    python runner.py tools/by_vramcalc.py < settings.jsonl > answers.jsonl

Nothing but the standard library is imported here, so it runs wherever the tool does. What the tool
prints goes to stderr. An answer is `{"number", "bytes", "fits", "step_seconds", "seconds"}`, of
which a tool leaves out what it does not say; or `{"number", "cannot": why}`.
"""

import contextlib
import importlib.util
import json
import os
import sys
import time


def main() -> None:
    """Answer every line."""
    [path] = sys.argv[1:]
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # what the tool prints from C too
    sys.path.pop(0)  # this folder
    spec = importlib.util.spec_from_file_location("tool", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for line in sys.stdin:
        setting = json.loads(line)
        start = time.perf_counter()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                said = tool.answer(setting)
        except Exception as error:
            said = {"cannot": f"{type(error).__name__}: {error}"[:300]}
        if isinstance(said, str):
            said = {"cannot": said}
        said |= {"number": setting["number"], "seconds": time.perf_counter() - start}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
