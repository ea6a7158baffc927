"""A script that becomes another program, which dies with its parent, perhaps as another user.

`python -I -S launch.py PARENT SIGNAL UID GID PROGRAM ARGUMENTS…`: ask the kernel to send SIGNAL
when the parent PARENT dies, take on UID and GID (-1: stay), then replace this process by PROGRAM.
It is a program of its own because code between fork and exec must not run in a process with
threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read the arguments and become the program."""
    parent, death_signal, uid, gid = (int(value) for value in sys.argv[1:5])
    if gid >= 0:
        os.setgroups([])
        os.setgid(gid)
    if uid >= 0:
        os.setuid(uid)
    if sys.platform == "linux":
        # After setuid, which clears it. It stays over exec.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execv(sys.argv[5], sys.argv[5:])
    except OSError as error:
        sys.stderr.write(f"{sys.argv[5]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


main()
