"""Names that both sides of Temporal share: task queues, activities, updates, search attributes."""

AGENTS_QUEUE = "agents"
TOOLS_QUEUE = "tools"

AGENT_WORKFLOW = "AgentWorkflow"
PLAN_WORKFLOW = "PlanWorkflow"
JOB_WORKFLOWS = (AGENT_WORKFLOW, PLAN_WORKFLOW)
"""What a job is to Temporal."""

OPEN_JOB = "open_job"
LLM_STEP = "llm_step"
SESSION_HINT = "session_hint"
CALL_TOOL = "call_tool"
CHECK_APPROVAL = "check_approval"
KEEP_RESULT = "keep_result"

TASK = "task"
"""The one argument of a call to a sub-agent."""

PROGRESS_QUERY = "progress"
WAITS_QUERY = "waits"
PLAN_QUERY = "plan"
PLAN_STATE_QUERY = "plan_state"
MESSAGE_UPDATE = "message"
DECIDE_UPDATE = "decide"
PAUSE_UPDATE = "pause"
RESUME_UPDATE = "resume"

SEARCH_AGENT = "MusterAgent"
SEARCH_TENANT = "MusterTenant"
SEARCH_STATE = "MusterState"
SEARCH_WAITING_FOR = "MusterWaitingFor"

WAITS_FOR_APPROVAL = "approval"
WAITS_FOR_RESUME = "resume"
WAITS_FOR_ANYONE = "approval:anyone"
"""Values of `MusterWaitingFor`; `waits_for_person` gives the others."""


def waits_for_person(name: str) -> str:
    """Value of `MusterWaitingFor` while a call waits for a decision that `name` may make."""
    return f"approval:person:{name}"


def tool_queue(group: str | None) -> str:
    """Task queue of a group's tool calls, or of those of no group."""
    return f"{TOOLS_QUEUE}.{group}" if group else TOOLS_QUEUE


def start_queue(model: str) -> str:
    """Task queue of `llm_step` for sessions the service has not seen yet."""
    return f"inference.{model}.start"


def continue_queue(model: str) -> str:
    """Task queue of `llm_step` for sessions that have had a step."""
    return f"inference.{model}.continue"
