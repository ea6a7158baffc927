"""Plots of benchmark figures, as image files; they need the `bench` extra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.journal import Figures, Key


@contextmanager
def panels(path: Path, count: int, *, width: float = 6, height: float = 4) -> Iterator[Any]:
    """Yield so many panels side by side, `width` x `height` inches each; then save them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown, grid = pyplot.subplots(
        1, count, figsize=(width * count, height), layout="constrained", squeeze=False
    )
    yield grid[0]
    shown.savefig(path, dpi=120)
    pyplot.close(shown)


def save_bars(
    runs: dict[Key, Figures], path: Path, keys: Sequence[str] = ("jct_mean_s", "makespan_s")
) -> None:
    """Draw the median of two figures for each policy, a panel per cell."""
    cells = list(dict.fromkeys(cell for cell, _, _ in runs))
    with panels(path, len(cells)) as found:
        for cell, axes in zip(cells, found, strict=True):
            names = list(dict.fromkeys(policy for c, policy, _ in runs if c == cell))
            for offset, key in zip((-0.2, 0.2), keys, strict=True):
                values = [_median(runs, cell, name, key) for name in names]
                axes.barh([n + offset for n in range(len(names))], values, height=0.4, label=key)
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.set_title(cell)
            axes.legend()


def _median(runs: dict[Key, Figures], cell: str, policy: str, key: str) -> float:
    found = [run[key] for (c, name, _), run in runs.items() if (c, name) == (cell, policy)]
    return float(median(found))
