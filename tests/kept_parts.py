"""What the tests of kept processes share with the processes that they start."""

import os
import sys

from memlab.runtime.process import KeptProcess

LEAVE = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]

def note(pid):
    (folder / str(pid)).touch()

def command():
    note(subprocess.Popen(SLEEP).pid)

def session():
    note(subprocess.Popen(SLEEP, start_new_session=True).pid)

def fork():
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    note(pid)

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(os.getpid())
            time.sleep(600)
        os._exit(0)
    os.wait()
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.01)

for leave in (command, session, fork, daemon):
    leave()
"""
IN_C = "ctypes.PyDLL(None).sleep(600)"  # holds the GIL, so no thread and no handler runs


def kept(source, *arguments, environment=None):
    """Start a plain Python under a keeper."""
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", "-c", source, *map(str, arguments)]
        return KeptProcess(command, writing, os.environ if environment is None else environment)
    finally:
        os.close(reading)
        os.close(writing)
