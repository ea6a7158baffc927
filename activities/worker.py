"""What a tool worker registers with Temporal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from activities.approval import check_approval
from activities.call_tool import CallTool
from activities.keep_result import KeepResult
from activities.open_job import OpenJob
from activities.toolbox import Toolbox
from store.database import Database


def tool_activities(database: Database, toolbox: Toolbox) -> list[Callable[..., Any]]:
    """Return the activities of the `tools` task queue, which those of groups have too.

    The process that runs them should wrap its life in `activities.output.guarded_output()`.
    """
    calls = CallTool(database, toolbox)
    kept = KeepResult(database)
    return [
        OpenJob(database, toolbox).open_job,
        check_approval,
        calls.call_tool,
        kept.keep_result,
    ]
