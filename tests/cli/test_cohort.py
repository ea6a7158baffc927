"""What `muster status` shows of the scheduler."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO
from typing import Any

from rich.console import Console

from inference_service.gpu_ledger import GPUAccount
from inference_service.scheduler.view import GapView, SchedulerView
from inference_service.touch_request import Overhead
from muster.cli.cohort import MAX_GAPS, print_cohorts


def shown(**fields: Any) -> str:
    """Return what is printed of an answer of `GET /cohorts` that differs in `fields`."""
    overhead = Overhead(refreshes=2, prompt_tokens=66, cached_tokens=64, completion_tokens=2)
    answer = {
        "scheduler": asdict(SchedulerView(ready=3, running=8)),
        "last_cohorts": [],
        "cache": {"block_size": 32, "is_degraded": False},
        "overhead": asdict(overhead) | {"computed_tokens": overhead.computed_tokens},
        "tokens": {"prompt": 0, "cached": 0},
        "gpu": asdict(GPUAccount()),
        **fields,
    }
    out = StringIO()
    print_cohorts(Console(file=out, width=160), answer)
    return out.getvalue()


def test_counts_shares_and_learned_gaps_are_shown() -> None:
    view = SchedulerView(
        ready=3, running=8, acting=12, admitted=20, working_set=870, watermark=980,
        num_blocks=1_000, gaps=(GapView("search", 41, 3, 2.5, 30.0), GapView("ask", 2, 9, 60, 90)),
    )  # fmt: skip
    text = shown(
        scheduler=asdict(view),
        last_cohorts=[{"age_s": 1.0, "steps": ["a", "b"]}, {"age_s": 0.5, "steps": ["c"]}],
        tokens={"prompt": 1_000, "cached": 710},
    )
    for part in ("3 ready, 8 running", "12 acting", "870 of 980", "71% cached", "4 tokens", "2 1"):
        assert part in text, text
    assert text.index("ask") < text.index("search"), "what most are out for stands first"
    assert "2.50 s" in text


def test_cache_that_cannot_be_seen_is_said_to_be_so() -> None:
    assert "not told by the engine" in shown(cache=None)
    assert "events were lost" in shown(cache={"block_size": 32, "is_degraded": True})
    assert "none yet cached" in shown()


def test_long_list_of_tools_is_cut() -> None:
    gaps = tuple(GapView(f"tool-{number}", 1, 0, 1.0, 2.0) for number in range(50))
    text = shown(scheduler=asdict(SchedulerView(ready=0, running=0, gaps=gaps)))
    assert text.count("tool-") == MAX_GAPS


def test_it_says_what_the_engines_time_went_to() -> None:
    account = GPUAccount(
        wall_s=200.0, useful_prefill_s=50.0, useful_decode_s=100.0, waste_s=0.4, idle_s=49.6
    )
    line = "Engine time  25% prefill, 50% decode, 25% nothing to do\n"
    assert line in shown(gpu=asdict(account))
    assert "Engine time" not in shown(), "nothing is known of the first moment"
