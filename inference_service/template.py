"""The served model's chat template: what it does to earlier messages, and conversations as ids.

A template is append-only if a longer conversation's text begins with the shorter one's, up to the
last end of turn. That cannot be read off a template, so it is tried, once, on short made-up
conversations: followed by a user's message, a tool's, several turns, and with reasoning text, which
some templates drop from all but the last turn.
"""

from __future__ import annotations

import re
from array import array

from inference_service.engine.protocol import ChatTokenizer
from inference_service.prompt import ChatMessage

_PROBE: list[ChatMessage] = [
    {"role": "system", "content": "Probe."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
]
_REASONED: ChatMessage = {"role": "assistant", "content": "<think>\nCount.\n</think>\n\nTwo."}
_USER: ChatMessage = {"role": "user", "content": "Three?"}
_AGAIN: ChatMessage = {"role": "user", "content": "Four?"}
_TOOL: ChatMessage = {"role": "tool", "content": "A result."}
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")


class ChatTemplate:
    """Renders and tokenises conversations; message contents never become control tokens.

    `defect` says in what way the template is not append-only; it is empty if none was found.
    `has_tool_role` and `must_alternate` say what it takes: a tool's message, and two messages of
    the user in a row, as a job has where several wait for its next turn.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._probe_end = self._end_of_turn(_PROBE)
        self.has_tool_role = self._tells(_TOOL)
        self.must_alternate = not self._tells(_USER, _AGAIN)
        self.defect = self._find_defect()

    def text(self, chat: list[ChatMessage]) -> str:
        """Return the text of a conversation and the head of the answer."""
        return self._tokenizer.render(chat, add_generation_prompt=True)

    def encode(
        self, chat: list[ChatMessage], *, is_added: bool = False, add_generation_prompt: bool = True
    ) -> array[int]:
        """Return the ids of a conversation, or of what it adds behind an assistant's end of turn.

        The added part is the difference of two renders, with and without `chat` behind a made-up
        conversation: a lone message rendered alone may grow a default system prompt.
        """
        contents = [message["content"] for message in chat]
        inert = any(s in text for text in contents for s in self._tokenizer.special_tokens)
        if inert:
            chat = [m | {"content": _placeholder(n)} for n, m in enumerate(chat)]
        probe = _PROBE if is_added else []
        text = self._tokenizer.render([*probe, *chat], add_generation_prompt=add_generation_prompt)
        if is_added:
            text = text[self._probe_end :]
        if not inert:
            return array("i", self._tokenizer.encode(text, split_special=False))
        ids: array[int] = array("i")
        for number, part in enumerate(_PLACEHOLDER.split(text)):
            is_content = number % 2 == 1
            piece = contents[int(part)] if is_content else part
            ids.extend(self._tokenizer.encode(piece, split_special=is_content))
        return ids

    @property
    def can_add(self) -> bool:
        """Whether what a message adds can be told at all: the template marks the end of a turn."""
        return self._probe_end >= 0

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

    def _tells(self, *added: ChatMessage) -> bool:
        """Say whether the template takes messages: some it may refuse, some leave out."""
        try:
            text = self.text([*_PROBE, *added])
        except Exception:
            # Templates refuse with whatever error their author chose.
            return False
        return all(message["content"] in text for message in added)

    def _find_defect(self) -> str:
        if not self.can_add:
            return "it does not mark the end of an assistant's turn"
        later = [[_USER], [_USER, _PROBE[2], _USER, _PROBE[2], _USER]]
        if self.has_tool_role:
            later.append([_TOOL])
        if not all(self._keeps(_PROBE, added) for added in later):
            return "it rewrites earlier messages"
        if not all(self._keeps([*_PROBE[:2], _REASONED], added) for added in later):
            return "it drops the reasoning text of earlier turns"
        return ""

    def _keeps(self, chat: list[ChatMessage], added: list[ChatMessage]) -> bool:
        before = self._tokenizer.render(chat, add_generation_prompt=False)
        return self.text([*chat, *added]).startswith(before[: self._end_of_turn(chat)])


def _placeholder(number: int) -> str:
    return f"\ue000{number}\ue001"
