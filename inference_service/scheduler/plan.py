"""How much of the KV cache to leave to work that is not kept: the cold room.

Sessions whose KV is kept (warm) recompute nothing, but the cache holds only so many of them, and
while their tools run the engine may have nothing to do. Room that is not kept can be used again
and again by sessions that come back cold: each of their steps computes its whole context again,
in time that would have been idle, and shares the engine's decode batches.

`cold_sessions` compares, for each number of sessions' room left to cold work, the steps per second
that both kinds would finish. With W warm sessions, a gap g between steps, n steps in the engine:

    a step's engine time      e = prefill + output x (a / n + c), a cold one's with the context more
    a step's time             l = prefill + output x (a + c n)
    warm steps per second     W / (g + l), at most 1 / e
    cold steps per second     by room A / l, by supply N / (g + l), by the time that is left over

Short gaps give 0 (the warm sessions keep the engine busy), long gaps give room to cold work.
"""

from __future__ import annotations

from dataclasses import dataclass

BETTER = 1.05
"""What another division must promise over the present one, so that noise moves nothing."""

ENOUGH = 0.9
"""The least room that promises this share of the most is taken: fewer sessions end sooner."""

WORTHWHILE = 1.15
"""What cold work must promise over none: the estimate knows no queues, and a lost KV is lost."""

MAX_CHOICES = 24
"""Divisions that are compared."""

ROUNDS = 6
"""Rounds in which rates and the time that prompts take are brought to agree."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is known of the engine and the sessions. Times in seconds, sizes in tokens.

    `room` is how many sessions' KV fits, `sessions` how many there are, waiting ones included.
    `context_tokens` is what a cold step computes besides its `new_tokens`.
    """

    room: float
    sessions: int
    gap_s: float
    context_tokens: float
    new_tokens: float
    output_tokens: float
    prefill_token_s: float
    decode_base_s: float
    decode_each_s: float
    max_num_seqs: int


def steps_per_s(load: Load, cold: float) -> float:
    """Return the steps finished per second if `cold` sessions' room is left to cold work."""
    warm = max(0.0, min(load.room - cold, load.sessions))
    base, each, output = load.decode_base_s, load.decode_each_s, load.output_tokens
    prefill_s = load.new_tokens * load.prefill_token_s
    again_s = load.context_tokens * load.prefill_token_s
    alone_s = prefill_s + output * (base + each)
    together = max(1.0, cold + warm * alone_s / (load.gap_s + alone_s))
    together = min(together, load.max_num_seqs)
    warm_engine_s = prefill_s + output * (base / together + each)
    cold_engine_s = warm_engine_s + again_s
    decode_s = output * (base + each * together)
    busy, warm_rate, cold_rate = 0.0, 0.0, 0.0
    for _ in range(ROUNDS):
        # decodes wait while prompts are computed
        stretched_s = decode_s / (1 - min(busy, 0.9))
        warm_rate = min(warm / (load.gap_s + prefill_s + stretched_s), 1 / warm_engine_s)
        cold_s = prefill_s + again_s + stretched_s
        cold_rate = min(
            cold / cold_s,
            max(0.0, load.sessions - warm) / (load.gap_s + cold_s),
            max(0.0, 1 - warm_rate * warm_engine_s) / cold_engine_s,
        )
        busy = 0.5 * (busy + (warm_rate + cold_rate) * prefill_s + cold_rate * again_s)
    return warm_rate + cold_rate


def cold_sessions(load: Load, now: float) -> float:
    """Return the best number of sessions' room for cold work, given that it is `now`."""
    if load.sessions <= load.room:
        return 0.0
    step = max(1.0, load.room / MAX_CHOICES)
    choices = [min(step * number, load.room) for number in range(int(load.room / step) + 1)]
    rates = [steps_per_s(load, cold) for cold in choices]
    enough = ENOUGH * max(rates)
    best, promised = next(pair for pair in zip(choices, rates, strict=True) if pair[1] >= enough)
    if promised < WORTHWHILE * steps_per_s(load, 0.0):
        return 0.0
    return best if promised > BETTER * steps_per_s(load, now) else now
