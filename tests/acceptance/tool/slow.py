"""A tool whose work is to take time."""

import time


def wait(seconds: float) -> str:
    """Take that long."""
    time.sleep(seconds)
    return "waited"
