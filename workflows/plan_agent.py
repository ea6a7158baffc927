"""Agents that stand for a plan, where what is made for agents is used for plans."""

from __future__ import annotations

from contracts.agent import AgentSpec, Limits
from contracts.job import AgentJobInput
from contracts.plan import Plan
from contracts.plan_job import PlanJobInput


def as_agent_job(job: PlanJobInput) -> AgentJobInput:
    """Return an agent's job that stands for a plan's where its queues, limits and names matter."""
    given = job.plan.limits
    limits = Limits(
        max_turns=10_000,
        max_tokens=given.max_tokens,
        max_tool_calls=given.max_tool_calls,
        max_llm_steps=given.max_llm_steps,
        max_engine_time=given.max_engine_time,
        max_wall_time=given.max_wall_time,
        last_answer_tokens=0,
    )
    return AgentJobInput(
        agent=AgentSpec(name=job.plan.name, instructions="A plan.", limits=limits),
        input="A plan's.",
        model=job.model,
        tenant=job.tenant,
        priority=job.priority,
        deadline=job.deadline,
    )


def tool_agent(plan: Plan) -> AgentSpec:
    """Return an agent that has the tools and agents of a plan that was checked."""
    return AgentSpec(
        name=plan.name,
        instructions=plan.description or "A plan.",
        tools=plan.tools,
        agents=plan.agents,
    )
