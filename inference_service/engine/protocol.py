"""The engine as the service sees it: token ids in, token ids out, in batches it forms itself.

One conformance suite (`tests/engine`) holds for every implementation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Protocol

from contracts.error import MusterError, UnavailableError
from contracts.llm_step import FinishReason
from inference_service.engine.cache_mirror import CacheMirror


class EngineRequestError(MusterError):
    """The engine refuses this request and always will (too long, bad schema)."""


class EngineDeadError(UnavailableError):
    """The engine process is gone or broken; every request in it is lost."""


WARM_UP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}},
    "required": ["ready"],
    "additionalProperties": False,
}
"""What engines warm up their grammar compiler with."""


class Capability(StrEnum):
    """What not every engine can do; everything else holds for all."""

    CACHED_TOKENS = auto()
    """`num_cached_tokens` is told, on the last piece of a generation at least; without, it is 0."""
    CACHED_TOKENS_AT_ONCE = auto()
    """`num_cached_tokens` is told from the first piece on; without, it is 0 before the last."""
    CACHE_RESET = auto()
    """`reset_prefix_cache` works."""
    EXACT_TOKEN_IDS = auto()
    """Sampled ids are the engine's own; without, they are ids of the text that it told."""
    LOAD = auto()
    """`stats` tells all that runs in the engine; without, our own requests only."""
    PRIORITY = auto()
    """`EngineRequest.priority` decides the order; without, it changes nothing."""
    STEPS = auto()
    """`on_step` is called after each engine step; without, never."""
    TIMING = auto()
    """Timings are the engine's own; without, waiting in its queue counts as prefill."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What the engine can hold at once, and compute in one engine step.

    `kv_tokens` is the KV cache's size in tokens, `max_num_batched_tokens` the most tokens of one
    engine step, prompts and decodes together.
    """

    max_num_seqs: int
    kv_tokens: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation: `prompt_token_ids` (non-empty) in, at most `max_tokens` sampled ids out.

    With `json_schema` the output is constrained to that schema. `priority`: lower is earlier.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = 0
    json_schema: dict[str, Any] | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Where a finished request's time went, in seconds, from the engine's monotonic clock."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """A piece of one generation: the ids sampled since the piece before.

    The sampled end-of-turn id, if any, is among `token_ids`. `num_cached_tokens` is the part of
    the prompt that the prefix cache held, known from the first piece on. `finish_reason` and
    `timing` are set on the last piece only.
    """

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    timing: EngineTiming | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: requests running and waiting in the engine, share of KV blocks referenced.

    `num_preemptions` counts, since the start, how often a running request lost its blocks.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineStepStats:
    """One engine step: how long the device computed, in seconds, and what.

    `prefill_tokens` are of prompts, `decode_tokens` of the `decode_requests` requests that were
    past theirs; more of them than of these requests are tokens that a preempted one computes again.
    `duration_s` is infinite where the engine prepares its next step during this one: then all the
    time since the step before went to it.
    """

    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    decode_requests: int


def ignore_step(_: EngineStepStats) -> None:
    """Do nothing: what engines call after a step until somebody wants to know."""


def answer_room(request: EngineRequest, max_model_len: int) -> int:
    """Return how many tokens a request may sample at most; EngineRequestError if none."""
    room = max_model_len - len(request.prompt_token_ids)
    if room < 1 or room == max_model_len or request.max_tokens < 1:
        raise EngineRequestError(
            f"a prompt of {max_model_len - room:,} tokens (max_tokens={request.max_tokens!r}) does "
            f"not leave room for an answer in a context window of {max_model_len:,} tokens",
            hint="shorten the conversation, or serve with a larger max_model_len",
        )
    return min(request.max_tokens, room)


class ChatTokenizer(Protocol):
    """The served model's tokenizer and chat template, as pure functions.

    `digest` changes whenever the vocabulary or the template does.
    """

    digest: str
    eos_token_id: int
    """Ends an assistant's turn."""
    special_tokens: tuple[str, ...]
    """Texts that would become control tokens if encoded with `split_special=False`."""

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Render `{"role", "content"}` messages with the chat template."""
        ...

    def encode(self, text: str, *, split_special: bool) -> list[int]:
        """Return token ids; no BOS or EOS is added. `split_special` keeps control text inert."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        ...

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        ...


class Engine(Protocol):
    """An inference engine. `start` first, `close` last; `generate` as often as wanted between.

    Closing the generator that `generate` returns (or cancelling its consumer) aborts the request;
    its KV blocks are free after the engine step in progress. Raises `EngineRequestError` for a
    request that can never run, `EngineDeadError` when the engine is gone.
    """

    on_step: Callable[[EngineStepStats], object]
    """Called after each engine step, before the tokens that it sampled are told."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The served model's tokenizer; valid after `start`."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this engine can do of what not every engine can; valid after `start`."""
        ...

    @property
    def cache(self) -> CacheMirror | None:
        """What the prefix cache holds; valid after `start`, None where the engine does not tell.

        It follows the engine by about a tenth of a second. A new start makes a new mirror.
        """
        ...

    async def start(self) -> EngineCapacity:
        """Load the model, warm up (grammar compilation included), and return the capacity."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Generate; yields pieces as they come, the last with `finish_reason`."""
        ...

    def blocks(self, num_tokens: int) -> int:
        """Return the KV blocks that a sequence of that many tokens occupies."""
        ...

    async def stats(self) -> EngineStats:
        """Return the current load."""
        ...

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine cannot serve."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are running or the engine cannot."""
        ...

    async def close(self) -> None:
        """Stop the engine and free its memory; idempotent."""
        ...
