"""Fit the simulated engine's cost model to measured engine steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from inference_service.engine.simulation import CostModel

ROUNDS = 20_000
"""Coordinate descent over five numbers; it has converged long before."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one or more engine steps computed, in the terms of `CostModel`."""

    steps: float = 0.0
    prefill_tokens: float = 0.0
    decoding: float = 0.0
    kv_tokens: float = 0.0
    prefill_pairs: float = 0.0

    @staticmethod
    def step(prefill: Sequence[tuple[int, int]] = (), decode: Sequence[int] = ()) -> Work:
        """Return one step: (tokens, tokens before them) of each prompt, contexts that decode."""
        return Work(
            steps=1,
            prefill_tokens=sum(n for n, _ in prefill),
            decoding=len(decode),
            kv_tokens=sum(n + start for n, start in prefill) + sum(decode),
            prefill_pairs=sum(n * (start + n / 2) for n, start in prefill),
        )

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Work of a kind and the seconds that it took."""

    kind: str
    work: Work
    duration_s: float


def fit(rows: Sequence[Measured]) -> CostModel:
    """Return the costs, none negative, with the least squared relative error over all rows."""
    scaled = [[x / row.duration_s for x in astuple(row.work)] for row in rows]
    size = len(astuple(Work()))
    norms = [math.sqrt(sum(row[k] ** 2 for row in scaled)) or 1.0 for k in range(size)]
    columns = [[row[k] / norms[k] for row in scaled] for k in range(size)]
    costs = [0.0] * size
    left = [1.0] * len(rows)
    for _ in range(ROUNDS):
        for k, column in enumerate(columns):
            step = max(sum(x * r for x, r in zip(column, left, strict=True)), -costs[k])
            costs[k] += step
            left = [r - step * x for x, r in zip(column, left, strict=True)]
    return CostModel(*(cost / norm for cost, norm in zip(costs, norms, strict=True)))


def predicted_s(cost: CostModel, work: Work) -> float:
    """Return the seconds that work takes by a cost model."""
    return float(sum(c * x for c, x in zip(astuple(cost), astuple(work), strict=True)))


def errors(cost: CostModel, rows: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return, of each kind and of all, the median and the worst relative error, and the bias."""
    found: dict[str, dict[str, float]] = {}
    for kind in [*dict.fromkeys(row.kind for row in rows), "all"]:
        ratios = [
            predicted_s(cost, row.work) / row.duration_s - 1
            for row in rows
            if kind in (row.kind, "all")
        ]
        found[kind] = {
            "median_error": statistics.median(map(abs, ratios)),
            "worst_error": max(map(abs, ratios)),
            "bias": statistics.fmean(ratios),
        }
    return found
