"""Activities of other workers as tools: here they are only described, the workflow calls them."""

from __future__ import annotations

from collections.abc import Sequence

from activities.kind.json_schema import check_schema
from activities.kind.told_schema import told_schema
from activities.tool import LoadedTool, ServedTool
from contracts.agent import ToolRef, ToolSchema
from contracts.error import BadInputError


class ActivityTools:
    """Describes remote activities, by what their agent file says."""

    async def describe(self, ref: ToolRef) -> Sequence[ServedTool]:
        """Return the one tool; raises BadInputError if its arguments are no JSON schema."""
        assert ref.activity is not None
        check_schema(ref.shown, ref.activity.arguments)
        told_schema(ref.shown, ref.activity.arguments)  # follows every reference in it
        return [
            ServedTool(
                ToolSchema(
                    name=ref.tool_name,
                    description=ref.activity.description,
                    arguments=ref.activity.arguments,
                )
            )
        ]

    async def load(self, ref: ToolRef) -> LoadedTool:
        """Refuse: its own worker runs it."""
        raise BadInputError(f"tool {ref.shown!r} is an activity of another worker")

    async def close(self) -> None:
        """Nothing is kept."""
