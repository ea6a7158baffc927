"""What a running stack leaves in its data directory, and what other commands learn from it.

`DATA_DIR/stack.lock` is held by the supervisor for as long as it lives: it alone says whether the
stack is up. `DATA_DIR/stack.json` describes it; a file without the lock is a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from contracts.error import BadInputError
from muster.settings import Settings

LOCK_TIMEOUT_S = 0.5
"""A held lock is tried for this long: other commands hold it for an instant when they look."""


class PartState(StrEnum):
    """How a part of the stack stands."""

    WAITING = "waiting"
    """Its turn to start has not come."""
    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    """It died; the next start waits for its backoff."""
    FAILED = "failed"
    """It died too often and is not started again."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    EXTERNAL = "external"
    """Settings name one that runs elsewhere."""


class StackPhase(StrEnum):
    """How the stack as a whole stands."""

    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PartRecord(_Model):
    """One part as `status` shows it; `since` is the Unix time at which its process started."""

    name: str
    state: PartState
    pid: int | None = None
    since: float | None = None
    restarts: int = 0
    address: str = ""
    log: str = ""
    message: str = ""


class StackRecord(_Model):
    """The content of `stack.json`."""

    phase: StackPhase
    supervisor_pid: int
    since: float
    temporal_address: str
    temporal_namespace: str
    temporal_ui_url: str
    database_url: str
    inference_url: str
    model: str
    engine: str
    parts: tuple[PartRecord, ...]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the parts are; `temporal_ui_url` is empty if nobody knows (an external server)."""

    temporal_address: str
    temporal_ui_url: str
    database_url: str
    inference_url: str
    model: str


def locate(settings: Settings) -> Addresses:
    """Return where the parts are: as the settings say, else as the running stack says.

    With neither, the addresses the embedded parts would have; `database_url` is empty then.
    """
    record = running_stack(settings.data_dir)
    embedded_temporal = record.temporal_address if record else ""
    temporal = settings.temporal_address or embedded_temporal
    ui_url = f"http://127.0.0.1:{settings.temporal_ui_port}"
    inference = record.inference_url if record else ""
    return Addresses(
        temporal_address=temporal or f"127.0.0.1:{settings.temporal_port}",
        temporal_ui_url=(
            "" if settings.temporal_address else record.temporal_ui_url if record else ui_url
        ),
        database_url=settings.database_url or (record.database_url if record else ""),
        inference_url=(
            settings.inference_url or inference or f"http://127.0.0.1:{settings.inference_port}"
        ),
        model=record.model if record else settings.served_model,
    )


def running_stack(data_dir: Path) -> StackRecord | None:
    """Return what the stack of this data directory says of itself, or None if none is running."""
    return read_record(data_dir) if is_locked(data_dir) else None


def read_record(data_dir: Path) -> StackRecord | None:
    """Return the content of `stack.json`, or None if there is none that can be read."""
    try:
        return StackRecord.model_validate_json((data_dir / "stack.json").read_bytes())
    except (OSError, ValidationError):
        return None


def write_record(data_dir: Path, record: StackRecord) -> None:
    """Replace `stack.json` as a whole, so that no reader sees half of it."""
    temporary = data_dir / "stack.json.new"
    # Only for its owner: an external database's URL may hold a password.
    temporary.touch(mode=0o600)
    temporary.write_text(record.model_dump_json(indent=2) + "\n")
    temporary.replace(data_dir / "stack.json")


def remove_record(data_dir: Path) -> None:
    """Remove `stack.json`."""
    (data_dir / "stack.json").unlink(missing_ok=True)


def make_data_dir(settings: Settings) -> None:
    """Make the data directory and its log directory, or raise BadInputError."""
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings.log_dir.mkdir(exist_ok=True)
        probe = settings.data_dir / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise BadInputError(
            f"data directory {str(settings.data_dir)!r} is not writable: {error.strerror}",
            hint="choose another with --data-dir or MUSTER_DATA_DIR",
        ) from error


def is_locked(data_dir: Path) -> bool:
    """Tell whether a supervisor holds this data directory."""
    with contextlib.suppress(OSError), (data_dir / "stack.lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def hold_lock(data_dir: Path) -> Iterator[bool]:
    """Hold the data directory's lock and write our pid into it.

    Yields False if another supervisor holds it.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with (data_dir / "stack.lock").open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.02)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield True


def holder_pid(data_dir: Path) -> int | None:
    """Return the process id of the supervisor that holds this data directory, if one does."""
    if not is_locked(data_dir):
        return None
    with contextlib.suppress(OSError, ValueError):
        return int((data_dir / "stack.lock").read_text())
    return None


def hide_password(url: str) -> str:
    """Return a URL with its password, if it has one, replaced by dots."""
    return re.sub(r"(://[^:/@]*):[^@/]+@", r"\1:…@", url)
