"""A session of the world: where it is in its plan and what its context holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from bench.world.plan import PERSON, SessionPlan, StepPlan
from inference_service.engine.simulation import Generation
from inference_service.scheduler.event import Node, SessionIdle, StepReady, ToolsStarted


class Place(StrEnum):
    """Where a session is. Waiting ones are watched for evictions."""

    READY = "ready"
    RUNNING = "running"
    ACTING = "acting"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Session:
    """`keys` name the whole blocks of the context, as far as it is planned: prompt and answer.

    `tokens` is the context's length: of the prompt while a step is ready or runs, with the answer
    afterwards. `computed_tokens` of it have had their KV computed once.
    """

    plan: SessionPlan
    number: int
    block_size: int
    opening: int
    place: Place = Place.ACTING
    index: int = -1
    leaf: str = ""
    path: list[Node] = field(default_factory=list[Node])
    keys: list[int] = field(default_factory=list[int])
    tokens: int = 0
    computed_tokens: int = 0
    attainable_tokens: int = 0
    attained_s: float = 0.0
    ready_s: float = 0.0
    generation: Generation | None = None
    saw_first_token: bool = False
    watched: int | None = None
    num_keys: int = 0
    num_leaves: int = 0

    def __post_init__(self) -> None:
        self.leaf = self.plan.name
        if self.plan.shared_tokens:
            self.path = [Node(f"opening/{self.plan.opening}", self.plan.shared_tokens)]

    @property
    def step(self) -> StepPlan:
        """The plan of the step that the session is at."""
        return self.plan.steps[self.index]

    @property
    def step_id(self) -> str:
        """Name of that step."""
        return f"{self.plan.name}/{self.index}"

    @property
    def is_last(self) -> bool:
        """Whether that step is the session's last."""
        return self.index == len(self.plan.steps) - 1

    def next_step(self, *, is_first_of_opening: bool) -> None:
        """Go on to the next step: its prompt is the context now."""
        self.index += 1
        step, size = self.step, self.block_size
        if step.keep_tokens is not None and step.keep_tokens < self.tokens:
            self._shrink(step.keep_tokens)
        cached = self.computed_tokens
        if self.index == 0 and not is_first_of_opening:
            cached = self.plan.shared_tokens
        self.tokens += step.new_tokens
        self.attainable_tokens = min(cached, self.tokens - 1) // size * size
        self.path.append(Node(self.step_id, self.tokens))
        self._name(self.tokens + step.output_tokens)

    def finish_step(self) -> Node:
        """Let the answer join the context; returns the leaf. Its last token has no KV yet."""
        self.tokens += self.step.output_tokens
        self.computed_tokens = self.tokens - 1
        self.path[-1] = Node(self.step_id, self.tokens)
        return self.path[-1]

    def waits(self) -> ToolsStarted | SessionIdle:
        """Return the event that tells what the session waits for after its step."""
        if self.step.tool == PERSON:
            return SessionIdle(self.leaf)
        return ToolsStarted(self.leaf, (self.step.tool,))

    def ready(self, *, cached_tokens: int | None) -> StepReady:
        """Return the event that tells of the step."""
        return StepReady(
            step_id=self.step_id,
            session=self.leaf,
            path=tuple(self.path),
            max_tokens=self.step.room,
            is_new=self.index == 0,
            cached_tokens=cached_tokens,
            job=self.plan.name,
            attained_s=self.attained_s,
        )

    def whole_keys(self) -> list[int]:
        """Return the keys of the context's whole blocks; its last token is always computed."""
        return self.keys[: (self.tokens - 1) // self.block_size]

    def _shrink(self, keep_tokens: int) -> None:
        """Drop the context's end: what comes next is another leaf of the job's tree."""
        self.tokens = keep_tokens
        self.computed_tokens = min(self.computed_tokens, keep_tokens)
        self.keys = self.keys[: keep_tokens // self.block_size]
        self.num_leaves += 1
        self.leaf = f"{self.plan.name}.{self.num_leaves}"
        kept = [node for node in self.path if node.end <= keep_tokens]
        if keep_tokens > (kept[-1].end if kept else 0):
            kept.append(Node(f"{self.leaf}/kept", keep_tokens))
        self.path = kept

    def _name(self, num_tokens: int) -> None:
        """Name the whole blocks up to there: those of the opening for all, others for itself."""
        shared = self.plan.shared_tokens // self.block_size
        for index in range(len(self.keys), num_tokens // self.block_size):
            if index < shared:
                self.keys.append(-((self.opening << 32) + index + 1))
            else:
                self.num_keys += 1
                self.keys.append((self.number << 32) + self.num_keys)
