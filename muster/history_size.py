"""What takes the bytes of a job's history: by kind of event, by run, and the largest payload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from google.protobuf.message import Message as Protobuf
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent

from contracts.message import Frozen
from muster.job_history import JobHistory

_PREFIX = "EVENT_TYPE_"


class Share(Frozen):
    """All events of one kind; `share` is of the bytes of the whole history, 0 to 1."""

    what: str
    count: int
    bytes: int
    share: float


class RunSize(Frozen):
    """One run."""

    run_id: str
    events: int
    bytes: int


class LargestPayload(Frozen):
    """The largest single payload: which event of which run carries it, and its bytes."""

    run_id: str
    event_id: int
    what: str
    bytes: int


class HistorySize(Frozen):
    """The size of a job's history, as protobuf; kinds with most bytes first, runs oldest first."""

    job_id: str
    events: int
    bytes: int
    kinds: tuple[Share, ...]
    runs: tuple[RunSize, ...]
    largest_payload: LargestPayload | None


def history_size(history: JobHistory) -> HistorySize:
    """Measure a job's history."""
    counts, sizes = defaultdict[str, int](int), defaultdict[str, int](int)
    runs: list[RunSize] = []
    largest: LargestPayload | None = None
    for run in history.runs:
        names = _activity_names(run.events)
        for event in run.events:
            what = _what(event, names)
            counts[what] += 1
            sizes[what] += event.ByteSize()
            for payload in _payloads(event):
                size = payload.ByteSize()
                if largest is None or size > largest.bytes:
                    largest = LargestPayload(
                        run_id=run.run_id, event_id=event.event_id, what=what, bytes=size
                    )
        whole = sum(event.ByteSize() for event in run.events)
        runs.append(RunSize(run_id=run.run_id, events=len(run.events), bytes=whole))
    total = sum(sizes.values())
    kinds = [
        Share(what=what, count=counts[what], bytes=size, share=size / total)
        for what, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    ]
    return HistorySize(
        job_id=history.job_id,
        events=sum(counts.values()),
        bytes=total,
        kinds=tuple(kinds),
        runs=tuple(runs),
        largest_payload=largest,
    )


def _activity_names(events: Sequence[HistoryEvent]) -> dict[int, str]:
    """Return the activities of a run by the events that scheduled them."""
    return {
        event.event_id: event.activity_task_scheduled_event_attributes.activity_type.name
        for event in events
        if event.HasField("activity_task_scheduled_event_attributes")
    }


def _what(event: HistoryEvent, names: dict[int, str]) -> str:
    """Return an event's kind in words; one of an activity names it: `llm_step: completed`."""
    kind = EventType.Name(event.event_type).removeprefix(_PREFIX).lower().replace("_", " ")
    attributes = event.WhichOneof("attributes")
    if not kind.startswith("activity task ") or attributes is None:
        return kind
    scheduled = getattr(getattr(event, attributes), "scheduled_event_id", event.event_id)
    name = names.get(scheduled)
    return f"{name}: {kind.removeprefix('activity task ')}" if name else kind


def _payloads(message: Protobuf) -> Iterator[Payload]:
    """Yield every payload inside a protobuf message."""
    if isinstance(message, Payload):
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        if isinstance(value, Protobuf):
            yield from _payloads(value)
            continue
        values = value.values() if hasattr(value, "values") else value
        for each in values:
            if isinstance(each, Protobuf):
                yield from _payloads(each)
