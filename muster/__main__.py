"""`python -m muster` and the console script `muster`."""

from __future__ import annotations

from muster.cli import main

if __name__ == "__main__":
    main()
