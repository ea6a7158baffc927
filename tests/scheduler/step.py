"""Steps and lives of few words, for tests that say what happens one event at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inference_service.scheduler.decision import Dispatch
from inference_service.scheduler.event import (
    CapacityChanged,
    Event,
    FirstToken,
    Node,
    SessionEnded,
    StepFinished,
    StepReady,
    ToolsStarted,
)
from inference_service.scheduler.setting import SchedulerSettings
from tests.scheduler.life import Life, Place

BLOCK = 16
CAPACITY = CapacityChanged(
    max_num_seqs=32, num_blocks=100, block_size=BLOCK, max_model_len=8_000, prefill_tokens=8_000
)


def new_life(settings: SchedulerSettings | None = None, **capacity: int) -> Life:
    """Return a life on an engine of 100 blocks of 16 tokens, or as said."""
    return Life(replace(CAPACITY, **capacity), settings or SchedulerSettings())


def new_step(session: str, tokens: int, *, opening: int = 0, **more: Any) -> StepReady:
    """Return the first step of a session, of so many tokens; `opening` of them shared by all."""
    base = (Node("opening", opening),) if opening else ()
    path = (*base, Node(f"{session}/0", tokens))
    given: dict[str, Any] = {"max_tokens": 8, "is_new": True, **more}
    return StepReady(step_id=f"{session}/0", session=session, path=path, **given)


def next_step(life: Life, session: str, tokens: int, **more: Any) -> StepReady:
    """Return the step that continues a session by so many tokens."""
    path = life.sessions[session].path
    step_id = f"{session}/{len(path)}"
    node = Node(step_id, path[-1].end + tokens)
    given: dict[str, Any] = {"max_tokens": 8, "is_new": False, **more}
    return StepReady(step_id=step_id, session=session, path=(*path, node), **given)


def finish(
    life: Life, session: str, tool: str = "tool", output: int = 8, *, is_last: bool = True
) -> None:
    """Let a session's step end; its tool is called, or it ends if that is ""."""
    sitting = life.sessions[session]
    assert sitting.place is Place.RUNNING and sitting.step, session
    if not sitting.has_token:
        life.tell(FirstToken(sitting.step.step_id, 0), is_last=False)
    leaf = sitting.path[-1]
    life.tell(StepFinished(sitting.step.step_id, Node(leaf.id, leaf.end + output)), is_last=False)
    gone: Event = ToolsStarted(session, (tool,)) if tool else SessionEnded(session)
    life.tell(gone, is_last=is_last)


def dispatched(life: Life) -> list[str]:
    """Return the steps dispatched so far, in order."""
    return [
        step_id
        for _, _, decisions in life.log
        for decision in decisions
        if isinstance(decision, Dispatch)
        for step_id in decision.cohort
    ]


def keep(life: Life, *sessions: StepReady, tool: str = "tool") -> None:
    """Let new sessions have their first step, one after the other; their tools are out then."""
    for ready in sessions:
        life.tell(ready)
        finish(life, ready.session, tool)


def learn(life: Life, tool: str, gap_s: float, times: int = 30) -> None:
    """Let sessions come back from a tool after so long."""
    for number in range(times):
        name = f"{tool}{number}"
        life.tell(new_step(name, 30))
        life.now += 0.03  # a token in a millisecond
        finish(life, name, tool)
        life.now += gap_s
        life.tell(next_step(life, name, 5))
        life.now += 0.005
        finish(life, name, "")
