"""What of a step's prompt a cache that never evicts would have held.

History alone tells it: a step goes on from the conversation of an earlier one, whose prompt and
answer the engine has computed. How far prompts of different sessions begin alike it does not tell;
so what was cached beyond a session's own past counts as attainable, too.
"""

from __future__ import annotations

from contracts.llm_step import LLMStepInput, LLMStepResult

BLOCK_TOKENS = 16
"""Engines cache whole blocks. History does not say how large they are; this is vLLM's smallest."""


class Sessions:
    """How long the sessions of one job are, as its steps finish; call it in their order."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def attainable(self, asked: LLMStepInput | None, result: LLMStepResult) -> int:
        """Return the attainable tokens of a step's prompts, no less than those that were cached.

        The last token of a prompt is always computed. Where a step took several attempts, whose
        prompts are added up, it is an upper bound.
        """
        usage = result.usage
        kept = max(0, usage.completion_tokens - usage.wasted_tokens)
        self._lengths[result.step_id] = usage.prompt_tokens + kept
        base = asked.base.token_run if asked and asked.base else None
        known = self._lengths.get(base, 0) if base else 0
        if result.diverged:
            known = min(known, result.diverged.position)
        known = max(0, min(known, usage.prompt_tokens - 1))
        return max(usage.cached_tokens, known // BLOCK_TOKENS * BLOCK_TOKENS)
