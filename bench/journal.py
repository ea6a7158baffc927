"""Figures of finished runs in a file of JSON lines, so that a long bench can be taken up again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Key = tuple[str, str, int]
"""Cell, policy, seed."""
Figures = Mapping[str, Any]


class Journal:
    """Finished runs by key. With a file, each is written there as it ends, and read at the start.

    What JSON has no number for (a run that never ended took infinite time) is null there.
    """

    def __init__(self, path: Path | None = None, *, again: Iterable[str] = ()) -> None:
        self._path = path
        self.runs: dict[Key, Figures] = {}
        if path is not None and path.exists():
            self._read(path, set(again))

    def __contains__(self, key: Key) -> bool:
        return key in self.runs

    def add(self, key: Key, figures: Figures) -> None:
        """Keep the figures of a run."""
        self.runs[key] = figures
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(_line(key, figures))

    def _read(self, path: Path, again: set[str]) -> None:
        """Read the file; runs of the policies in `again` are dropped, and a torn last line."""
        lines = path.read_text().splitlines()
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["policy"] not in again:
                figures = {k: math.inf if v is None else v for k, v in row["figures"].items()}
                self.runs[row["cell"], row["policy"], row["seed"]] = figures
        path.write_text("".join(_line(key, figures) for key, figures in self.runs.items()))


def _line(key: Key, figures: Figures) -> str:
    cell, policy, seed = key
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
    row = {"cell": cell, "policy": policy, "seed": seed, "figures": plain}
    return json.dumps(row, allow_nan=False) + "\n"
