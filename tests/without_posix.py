"""Takes away what only POSIX has, from this process and from every worker that it starts.

The builds of torch and numpy for this system use some of it and are imported before. What Python
itself needs here to start a process stays: `os.waitpid`. As a program it does so and then runs
another one, given by its path.
"""

import multiprocessing.util  # noqa: F401
import os
import platform  # noqa: F401
import random  # noqa: F401
import runpy
import select
import signal
import socket
import sys
import tempfile  # noqa: F401

import numpy  # noqa: F401
import torch.distributed  # noqa: F401

IN_OS = (
    "EX_OK", "PRIO_PROCESS", "SCHED_BATCH", "chown", "chroot", "ctermid", "fchdir",
    "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getgroups",
    "getloadavg", "getpgid", "getpgrp", "getpriority", "getresuid", "getsid", "getuid",
    "initgroups", "killpg", "lchown", "lockf", "mkfifo", "mknod", "nice", "openpty", "pathconf",
    "pidfd_open", "pipe2", "posix_spawn", "posix_spawnp", "pread", "preadv", "pwrite", "pwritev",
    "register_at_fork", "sched_get_priority_max", "sched_getaffinity", "sched_getparam",
    "sched_getscheduler", "sched_setaffinity", "sched_setscheduler", "sched_yield", "sendfile",
    "setpgid", "setpriority", "setsid", "setuid", "statvfs", "sysconf", "tcgetpgrp", "ttyname",
    "uname", "wait", "wait3", "wait4", "waitid",
)  # fmt: skip
IN_SIGNAL = (
    "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP",
    "SIGUSR1", "SIGUSR2", "SIG_BLOCK", "SIG_SETMASK", "alarm", "getitimer", "pthread_kill",
    "pthread_sigmask", "setitimer", "sigwait", "ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF",
)  # fmt: skip
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty", "_posixshmem")
NAMES = {os: IN_OS, signal: IN_SIGNAL, select: ("poll", "epoll"), socket: ("AF_UNIX",)}


def take_away() -> None:
    """Do it."""
    for module, names in NAMES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in MODULES:
        sys.modules[name] = None


if __name__ == "__main__":
    take_away()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
