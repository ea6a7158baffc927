"""Names that both sides of Temporal share: task queues, activities, updates, search attributes."""

AGENTS_QUEUE = "agents"
TOOLS_QUEUE = "tools"

AGENT_WORKFLOW = "AgentWorkflow"

OPEN_JOB = "open_job"
LLM_STEP = "llm_step"
SESSION_HINT = "session_hint"
CALL_TOOL = "call_tool"

TASK = "task"
"""The one argument of a call to a sub-agent."""

PROGRESS_QUERY = "progress"
MESSAGE_UPDATE = "message"

SEARCH_AGENT = "MusterAgent"
SEARCH_TENANT = "MusterTenant"
SEARCH_STATE = "MusterState"
SEARCH_WAITING_FOR = "MusterWaitingFor"


def start_queue(model: str) -> str:
    """Task queue of `llm_step` for sessions the service has not seen yet."""
    return f"inference.{model}.start"


def continue_queue(model: str) -> str:
    """Task queue of `llm_step` for sessions that have had a step."""
    return f"inference.{model}.continue"
