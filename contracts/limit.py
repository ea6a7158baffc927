"""Every limit on size and count that contracts carry, each with its unit and reason."""

MAX_INPUT_BYTES = 1_000_000
"""A job's input text. Temporal refuses payloads over 2 MB, and the agent needs room too."""

MAX_AGENT_BYTES = 400_000
"""An agent as JSON. A job that rolls over hands on its agent, its open calls or what an LLM step
appends, its inbox and its counts in one Temporal payload."""

MAX_APPEND_BYTES = 1_400_000
"""Messages that one LLM step appends, as JSON."""

MAX_MESSAGE_BYTES = 64_000
"""One message to a running job, as JSON."""

MAX_INBOX_BYTES = 128_000
"""Messages that wait for a job's next turn, together, as JSON."""

MAX_MESSAGE_ID_CHARS = 64
"""Id of a message, which its sender chooses; a job remembers many."""

MAX_AGENT_FILE_BYTES = 256_000
"""An agent's YAML file, instructions and few-shot examples included."""

MAX_START_BYTES = 1_900_000
"""A job's input with its agent, as JSON: Temporal refuses payloads over 2 MB, for ever."""

MAX_TOOLSET_BYTES = 500_000
"""The schemas of all tools of one agent, as JSON: each LLM step reads them."""

MAX_ASSISTANT_BYTES = 700_000
"""An assistant message as JSON, with the calls it asks for: a job that rolls over while they are
open hands them on, and the results of those that are done."""

MAX_CARRIED_BYTES = 2_000_000
"""What one run of a job hands on to the next, as JSON: Temporal refuses payloads over 2 MiB."""

INLINE_RESULT_BYTES = 16_000
"""A tool result up to this, as JSON, stands in history; of a larger one a preview does."""

MAX_TOOL_RESULT_BYTES = 256_000
"""Default limit on one tool result; a tool's policy may set less or more, up to the next limit."""

HARD_TOOL_RESULT_BYTES = 64_000_000
"""No policy may let a tool result grow past this: it is one value in the database, read whole."""

MAX_REMOTE_RESULT_BYTES = 1_900_000
"""A result of another worker's activity, as JSON: it is a Temporal payload, which is refused over
2 MB, and becomes one again on its way to the store."""

MAX_TOOLS = 64
"""Tools of one agent: more do not fit a small model's context window."""

MAX_AGENT_DEPTH = 3
"""Levels of agents that call agents."""

MAX_PARALLEL_TOOL_CALLS = 32
"""Tool calls that one assistant message may ask for."""

MAX_APPROVERS = 10
"""People that one call's approval may need: their names go with the job when it rolls over."""

MAX_NAMED_APPROVERS = 16
"""People that one approval policy may name."""

MAX_REASON_CHARS = 500
"""Why a person decided so: the model reads it, and it goes with the job when it rolls over."""

MAX_DECISION_ID_CHARS = 64
"""Id of a decision, which its client chooses; a job remembers many."""

MAX_STEP_FAILURES = 3
"""Failures of one LLM step (stall, invalid output, a bug) before it fails for good."""

MAX_SEED = 2**32 - 1
"""Seed of an agent's sampling; engines keep it in 64 bits, and a repaired sample adds to it."""

MAX_PLAN_NODES = 500
"""Nodes of one plan, and of one `map`'s body."""

MAX_MAP_WIDTH = 200
"""Items that one `map` works on at a time; Temporal takes 2,000 pending activities of a job."""

MAX_MAP_DEPTH = 4
"""Levels of maps in maps."""

MAX_MAP_ITEMS = 10_000
"""Items of one map: what they give is one value."""

MAX_PLAN_BYTES = 300_000
"""A plan as JSON. A plan that rolls over hands it on with all values in one Temporal payload."""

MAX_PLAN_INPUT_BYTES = 200_000
"""A plan's input as JSON, for the same reason."""

MAX_PLAN_VALUES_BYTES = 1_000_000
"""The values of a plan's nodes that are still needed, together, as JSON, for the same reason."""
