"""What the scheduler knows of one session and of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from inference_service.scheduler.event import StepReady
from inference_service.scheduler.kv_model import Chain


class State(StrEnum):
    """Where a session is.

    READY: it has a step that waits; RUNNING: its step is in the engine; ACTING: its tools are in
    flight; IDLE: it waits for a person or a timer, and holds nothing. A session whose KV is not
    believed cached is *cold*, whichever of these it is in.
    """

    READY = "ready"
    RUNNING = "running"
    ACTING = "acting"
    IDLE = "idle"


@dataclass(slots=True, eq=False)
class Session:
    """One growing leaf of one job's context tree.

    `admitted` is its place in the order of admission, None before it. It `holds` its KV from its
    admission until it yields, idles or ends.
    """

    id: str
    tenant: str
    chain: Chain = field(default_factory=list)
    state: State = State.IDLE
    admitted: int | None = None
    holds: bool = False
    steps: int = 0
    growth: float = 0.0
    """Mean growth of its steps after the first, in tokens."""
    last_tokens: int = 0
    """Length of its context when its last step finished."""
    tools: tuple[str, ...] = ()
    gap_key: str = ""
    away_since: float = 0.0
    is_touching: bool = False
    """Whether a refresh or prewarm of it is in the engine."""
    prewarmed_tokens: int = 0
    """What the last prewarm computed and no step has used yet."""

    @property
    def tokens(self) -> int:
        """Length of its context."""
        return self.chain[-1].end if self.chain else 0


class Phase(StrEnum):
    """Where a step is; each step is in exactly one place."""

    READY = "ready"
    PREFILL = "prefill"
    DECODE = "decode"


Kind = tuple[bool, int, bool, bool]
"""(is speculative, priority, has no deadline, is a new session): lower goes first."""


@dataclass(slots=True, eq=False)
class Step:
    """One step that is here. `kind` and then `key` are its place in the order, lower is earlier."""

    ready: StepReady
    session: Session
    arrival: int
    kind: Kind = (False, 0, True, True)
    key: tuple[float, ...] = ()
    phase: Phase = Phase.READY
    tail_blocks: int = 0
    cold_blocks: int = 0
    """Blocks that it takes while it runs, if its session is not to be kept afterwards."""
    uncomputed: int = 0
    expected_cached: int = 0
    is_aborting: bool = False

    @property
    def id(self) -> str:
        """The step's id."""
        return self.ready.step_id
