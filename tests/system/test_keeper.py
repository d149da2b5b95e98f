"""The keeper: whatever a process starts is gone with it, and what it prints costs nothing."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from memlab import MemlabError
from memlab.runtime import keeper
from memlab.runtime import process as keeping
from memlab.runtime.process import KeptProcess
from tests import ROOT
from tests.kept_parts import IN_C, LEAVE, kept
from tests.worker_parts import WAIT_SECONDS, wait_for


def is_there(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def left(folder):
    """Return the processes that noted themselves in a folder, once all four have."""
    assert wait_for(lambda: len(list(folder.iterdir())) == 4)
    pids = [int(file.name) for file in folder.iterdir()]
    assert all(map(is_there, pids))
    return pids


def assert_gone(pids):
    assert wait_for(lambda: not any(map(is_there, pids))), [pid for pid in pids if is_there(pid)]


def test_an_end_is_told_with_its_status_and_the_last_words():
    process = kept("import sys; print('first'); sys.exit('last')")
    assert process.wait(WAIT_SECONDS) == 1
    assert process.said() == "first\nlast\n" or process.said() == "last\nfirst\n"
    process.kill()
    assert not is_there(process.pid)


def test_a_signal_is_told_as_one():
    process = kept("import os; os.kill(os.getpid(), 11)")
    assert process.wait(WAIT_SECONDS) == -signal.SIGSEGV
    process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets orphans be adopted")
@pytest.mark.parametrize("end", ["sys.exit(3)", "os.abort()", IN_C])
def test_nothing_is_left_of_what_a_process_started(tmp_path, end):
    process = kept(f"{LEAVE}\n{end}", tmp_path)
    pids = [process.pid, *left(tmp_path)] if end == IN_C else [process.pid]
    if end != IN_C:
        assert process.wait(WAIT_SECONDS) is not None
        pids += [int(file.name) for file in tmp_path.iterdir()]
    process.kill()
    assert len(pids) == 5
    assert_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets orphans be adopted")
def test_nothing_is_left_when_the_caller_is_killed(tmp_path):
    folder = tmp_path / "left"
    folder.mkdir()
    script = textwrap.dedent(
        f"""
        import os, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from tests.kept_parts import IN_C, LEAVE, kept
        process = kept(LEAVE + IN_C, {str(folder)!r})
        print(process.pid, flush=True)
        if os.fork() == 0:  # holds the line to the keeper, and is no worker's affair
            os.setsid()
            time.sleep(5)
            os._exit(0)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as caller:
        pids = [int(caller.stdout.readline()), *left(folder)]
        caller.kill()
        assert_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_worker_does_not_outlive_its_keeper(tmp_path):
    (tmp_path / "worker.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'memlab' / 'runtime')!r})\n"
        "import start; start.end_with(int(sys.argv[-1]))\n"
        f"import ctypes; open(sys.argv[1], 'x'); {IN_C}\n"
    )
    process = kept(
        f"import runpy; runpy.run_path({str(tmp_path / 'worker.py')!r})", tmp_path / "on"
    )
    assert wait_for((tmp_path / "on").exists)
    process._keeper.kill()
    assert_gone([process.pid])
    assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
    process.kill()


def test_what_is_printed_has_a_bound_and_waits_for_nobody():
    num_bytes = 2**26
    process = kept(
        f"import os, sys\nfor _ in range({num_bytes} // 2**20): os.write(1, b'x' * 2**20)\n"
        "os.write(2, b'the end')"
    )
    assert process.wait(WAIT_SECONDS) == 0
    assert len(process.said()) == keeper.KEPT_BYTES
    assert process.said().endswith("xthe end")
    process.kill()


def test_a_command_that_is_not_there_is_said():
    reading, writing = os.pipe()
    process = KeptProcess(
        [sys.executable, "-I", "-c", "raise SystemExit('no such thing')"], writing, {}
    )
    os.close(reading)
    os.close(writing)
    assert process.wait(WAIT_SECONDS) == 1
    assert "no such thing" in process.said()
    process.kill()


def test_a_keeper_that_cannot_start_is_said(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no library found >&2; exit 9\n")
    broken.chmod(0o755)
    process = KeptProcess([str(broken)], 0, {})
    assert process.wait(WAIT_SECONDS) == 9
    with pytest.raises(MemlabError, match="no library found"):
        process.pid  # noqa: B018 - what is tested
    process.kill()


@pytest.mark.parametrize("executable", [None, "", "/no/such/python"])
def test_an_interpreter_is_found_where_none_is_named(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert os.access(keeping.interpreter(), os.X_OK)
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr(sys, "base_prefix", "/nowhere")
    with pytest.raises(MemlabError, match=r"sys\.executable="):
        keeping.interpreter()
