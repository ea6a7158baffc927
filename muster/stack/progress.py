"""What a person sees while the stack starts and stops: one line per change, and what is awaited."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from muster.stack.state import (
    PartRecord,
    PartState,
    StackPhase,
    StackRecord,
    hide_password,
)

_STYLE = {
    PartState.UP: "green",
    PartState.EXTERNAL: "green",
    PartState.RESTARTING: "yellow",
    PartState.FAILED: "red",
}


class Progress:
    """Prints the changes between the records it is given; `close` ends the waiting line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: dict[str, float] = {}
        self._seen: dict[str, tuple[PartState, str]] = {}
        self._status: Status | None = None

    def skip(self, record: StackRecord) -> None:
        """Take `record` as known already."""
        self._seen = {part.name: (part.state, part.message) for part in record.parts}

    def update(self, record: StackRecord) -> None:
        """Print what is new in `record`."""
        for part in record.parts:
            now = (part.state, part.message)
            if self._seen.get(part.name) != now and part.state is not PartState.WAITING:
                self._print(part)
            self._seen[part.name] = now
        self._wait_for(record)

    def close(self) -> None:
        """Take the waiting line away."""
        if self._status:
            self._status.stop()
            self._status = None

    def _print(self, part: PartRecord) -> None:
        if part.state is PartState.STARTING:
            self._began[part.name] = time.monotonic()
            if self._console.is_terminal:
                return
        took = ""
        if part.state is PartState.UP and part.name in self._began:
            took = f" in {time.monotonic() - self._began.pop(part.name):.1f} s"
        style = _STYLE.get(part.state, "default")
        detail = part.message if part.state is not PartState.STARTING else ""
        if not detail and part.state in (PartState.UP, PartState.EXTERNAL):
            detail = hide_password(part.address)
        line = f"  {part.name:<10} [{style}]{part.state}[/]{took}  "
        self._console.print(line + escape(detail), highlight=False, soft_wrap=True)

    def _wait_for(self, record: StackRecord) -> None:
        waiting = [
            part.name
            for part in record.parts
            if part.state in (PartState.STARTING, PartState.RESTARTING, PartState.STOPPING)
        ]
        if not waiting or not self._console.is_terminal:
            self.close()
            return
        verb = "stopping" if record.phase is StackPhase.STOPPING else "starting"
        text = f"{verb} {', '.join(waiting)} …"
        if self._status:
            self._status.update(text)
        else:
            self._status = self._console.status(text)
            self._status.start()
