"""Kill process groups once the process that started them is gone; a script, not a module.

`python -I -S sentinel.py`: each line on standard input is `+PGID` (guard this group) or `-PGID` (it
has ended). The input's end, which the kernel brings about however the supervisor dies, kills the
groups that are left. The kernel already kills the supervisor's children then, but not what those
have started: an engine's processes, a tool's programs.
"""

import os
import signal
import sys


def main() -> None:
    """Read groups until the input ends, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


main()
