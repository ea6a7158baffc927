"""Job ids: their form, new ones, and where a job is found in the Temporal UI."""

from __future__ import annotations

import re
from urllib.parse import quote

from ulid import ULID

from contracts.error import BadInputError

_JOB_ID = re.compile(r"job-[A-Za-z0-9_-]{1,176}")


def new_job_id() -> str:
    """Return a new job id; later ones sort after earlier ones."""
    return f"job-{str(ULID()).lower()}"


def check_job_id(job_id: str) -> str:
    """Return `job_id` if it has the form of one, else raise `BadInputError`."""
    if not _JOB_ID.fullmatch(job_id):
        shown = job_id if len(job_id) <= 60 else job_id[:57] + "..."
        raise BadInputError(
            f"{shown!r} is not a job id: they look like {new_job_id()}",
            hint="muster jobs lists the jobs",
        )
    return job_id


def ui_link(ui_url: str, namespace: str, job_id: str) -> str:
    """Return the address of a job in the Temporal UI."""
    return f"{ui_url.rstrip('/')}/namespaces/{quote(namespace, safe='')}/workflows/{job_id}"
