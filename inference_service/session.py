"""Token-exact sessions: the prompt of a step, as token ids, without tokenising anything twice.

Theory of operation. A session's ids only ever grow: the ids of the last step's prompt, the ids
sampled in answer to it, then the ids of the new messages. The new messages' ids are the suffix of
a two-render difference: a short made-up conversation is rendered with and without them, and what
the longer text adds, from just behind the assistant's end of turn on, is tokenised. The cost of a
step is so that of its new messages. This needs a chat template that is append-only, which is
checked when the service starts; with any other template the whole conversation is rendered again.

A session lives in memory under its token run, the id of the step that ended it. When it is not
there (first step, restart, another replica) it comes from the store: the token run's ids, or, when
this model has none, the messages rendered whole.

A message that refers to a text in the store is read whole: its preview is for people.
"""

from __future__ import annotations

import asyncio
import logging
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from contracts.error import BadInputError
from contracts.llm_step import LLMStepInput
from contracts.message import ContextRef, Message
from inference_service.engine.protocol import ChatTokenizer
from inference_service.prompt import ChatMessage, Toolset, chat_messages
from inference_service.scheduler.event import Node
from store.context import ContextStore, NotStoredError

log = logging.getLogger(__name__)

_PROBE: list[ChatMessage] = [
    {"role": "system", "content": "Probe."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
]
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
_MAX_OPENINGS = 1_024
"""Opening conversations kept in memory: each agent has one, however many jobs it has."""
_MAX_INLINE_CHARACTERS = 8_192
"""Texts up to this length are tokenised at once; longer ones in a thread, off the event loop."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one step. `token_ids[:base_length]` is the token run `parent`, unchanged.

    `kept` is how many of its first tokens are those of the step's base in this place: all of the
    base's, unless the chat template is not append-only. `opening` is the part that every prompt
    with this opening conversation begins with; a later step of a session has none.
    """

    token_ids: array[int]
    base_length: int
    parent: str | None
    kept: int = 0
    opening: Node | None = None


class Sessions:
    """Resolves contexts to token ids; keeps up to `max_tokens` ids of live sessions in memory."""

    def __init__(
        self, tokenizer: ChatTokenizer, contexts: ContextStore, *, max_tokens: int = 8_000_000
    ) -> None:
        self._tokenizer = tokenizer
        self._contexts = contexts
        self._max_tokens = max_tokens
        self._live: OrderedDict[str, array[int]] = OrderedDict()
        self._live_tokens = 0
        self._openings: OrderedDict[str, list[Message]] = OrderedDict()
        self._opening_ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._probe_end = self._end_of_turn(_PROBE)
        self.append_only = self._is_append_only()
        self._has_tool_role = self._renders_tool_role()
        if not self.append_only:
            log.warning("the chat template is not append-only: each step renders its whole prompt")

    @property
    def live_tokens(self) -> int:
        """Token ids held in memory."""
        return self._live_tokens

    async def resolve(self, step: LLMStepInput, toolset: Toolset) -> Prompt:
        """Return the step's prompt. Raises `NotStoredError` if the store lacks a part of it."""
        run = step.base.token_run if step.base else None
        base = await self._base(run) if run else None
        if base is None or not self.append_only:
            return await self._rendered_whole(step, toolset, base)
        chat = await self._chat(step.append, {})
        ids = base + await self._encode(chat, after_probe=True)
        return Prompt(ids, len(base), run, kept=len(base))

    def keep(self, run: str, token_ids: array[int], *, parent: str | None) -> None:
        """Keep the ids of the session that ends in step `run`, in place of its `parent`'s."""
        if parent is not None and parent in self._live:
            self._live_tokens -= len(self._live.pop(parent))
        self._live[run] = token_ids
        self._live_tokens += len(token_ids)
        while self._live_tokens > self._max_tokens and len(self._live) > 1:
            _, dropped = self._live.popitem(last=False)
            self._live_tokens -= len(dropped)

    async def _base(self, run: str) -> array[int] | None:
        if live := self._live.get(run):
            self._live.move_to_end(run)
            return live
        stored = await self._contexts.load_token_run(run, self._tokenizer.digest)
        return None if stored is None else array("i", stored)

    async def _rendered_whole(
        self, step: LLMStepInput, toolset: Toolset, base: array[int] | None
    ) -> Prompt:
        messages = [*await self._messages(step.base), *step.append]
        chat = await self._chat(messages, toolset)
        ids = await self._encode(chat)
        if step.base is not None and step.base.token_run is None:
            return Prompt(ids, 0, None, opening=await self._opening(step, toolset, ids))
        kept = 0 if base is None else _divergence(base, ids)
        if base is not None and kept < len(base):
            log.warning(
                "step %s: the prompt differs from its session at token %d of %d",
                step.step_id, kept, len(base),
            )  # fmt: skip
        return Prompt(ids, 0, None, kept=kept)

    async def _opening(self, step: LLMStepInput, toolset: Toolset, ids: array[int]) -> Node | None:
        """Return what the prompt shares with all others of its opening conversation and tools."""
        assert step.base is not None
        key = (step.base.head, step.toolset or "")
        if key not in self._opening_ids:
            opening = await self._messages(step.base)
            chat = await self._chat(opening, toolset)
            self._opening_ids[key] = await self._encode(chat, add_generation_prompt=False)
            if len(self._opening_ids) > _MAX_OPENINGS:
                self._opening_ids.popitem(last=False)
        else:
            self._opening_ids.move_to_end(key)
        length = min(_divergence(self._opening_ids[key], ids), len(ids) - 1)
        return Node(f"{key[0][:16]}.{key[1][:16]}.{length}", length) if length else None

    async def _messages(self, base: ContextRef | None) -> list[Message]:
        if base is None:
            return []
        if known := self._openings.get(base.head):
            self._openings.move_to_end(base.head)
            return known
        messages = await self._contexts.load(base.head)
        if base.token_run is None:
            self._openings[base.head] = messages
            if len(self._openings) > _MAX_OPENINGS:
                self._openings.popitem(last=False)
        return messages

    async def _chat(self, messages: Sequence[Message], toolset: Toolset) -> list[ChatMessage]:
        """Return the chat template's input; texts in the store stand in place of previews."""
        whole = [await self._whole(message) if message.blob else message for message in messages]
        return chat_messages(whole, toolset, has_tool_role=self._has_tool_role)

    async def _whole(self, message: Message) -> Message:
        assert message.blob is not None
        digest = message.blob.digest
        try:
            text = await self._contexts.get_blob(digest)
        except NotStoredError as error:
            raise NotStoredError(
                f"the result of tool {message.tool!r} (call {message.tool_call_id!r}, "
                f"{message.blob.bytes:,} bytes, blob {digest!r}) is not in the store",
                hint=error.hint,
            ) from error
        if not isinstance(text, str):
            raise BadInputError(f"blob {digest!r} is no text, so it cannot be a tool's result")
        return message.model_copy(update={"content": text, "blob": None})

    async def _encode(
        self,
        chat: list[ChatMessage],
        *,
        after_probe: bool = False,
        add_generation_prompt: bool = True,
    ) -> array[int]:
        size = sum(len(message["content"]) for message in chat)
        if size <= _MAX_INLINE_CHARACTERS:
            return self._encode_chat(chat, after_probe, add_generation_prompt)
        return await asyncio.to_thread(self._encode_chat, chat, after_probe, add_generation_prompt)

    def _encode_chat(
        self, chat: list[ChatMessage], after_probe: bool, add_generation_prompt: bool
    ) -> array[int]:
        """Return the ids of `chat` and the head of the answer; contents never become control."""
        contents = [message["content"] for message in chat]
        inert = any(s in text for text in contents for s in self._tokenizer.special_tokens)
        if inert:
            chat = [m | {"content": _placeholder(n)} for n, m in enumerate(chat)]
        probe = _PROBE if after_probe else []
        text = self._tokenizer.render([*probe, *chat], add_generation_prompt=add_generation_prompt)
        if after_probe:
            text = text[self._probe_end :]
        if not inert:
            return array("i", self._tokenizer.encode(text, split_special=False))
        ids: array[int] = array("i")
        for number, part in enumerate(_PLACEHOLDER.split(text)):
            is_content = number % 2 == 1
            piece = contents[int(part)] if is_content else part
            ids.extend(self._tokenizer.encode(piece, split_special=is_content))
        return ids

    def _end_of_turn(self, chat: list[ChatMessage]) -> int:
        """Return where the last end of turn ends in the rendered text, or -1."""
        text = self._tokenizer.render(chat, add_generation_prompt=False)
        eos = self._tokenizer.eos_token_id
        ends = [
            text.rindex(special) + len(special)
            for special in self._tokenizer.special_tokens
            if special in text and self._tokenizer.encode(special, split_special=False) == [eos]
        ]
        return max(ends, default=-1)

    def _renders_tool_role(self) -> bool:
        """Tell whether the template knows a tool's message: some refuse it, some leave it out."""
        probe = [*_PROBE, {"role": "tool", "content": "A result."}]
        try:
            return "A result." in self._tokenizer.render(probe, add_generation_prompt=True)
        except Exception:
            # Templates refuse with whatever error their author chose.
            return False

    def _is_append_only(self) -> bool:
        if self._probe_end < 0:
            return False
        before = self._tokenizer.render(_PROBE, add_generation_prompt=False)[: self._probe_end]
        longer = [*_PROBE, {"role": "user", "content": "Three?"}]
        after = self._tokenizer.render(longer, add_generation_prompt=True)
        return after.startswith(before)


def _placeholder(number: int) -> str:
    return f"\ue000{number}\ue001"


def _divergence(base: Sequence[int], ids: Sequence[int]) -> int:
    for position, (old, new) in enumerate(zip(base, ids, strict=False)):
        if old != new:
            return position
    return min(len(base), len(ids))
