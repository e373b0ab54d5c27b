"""Tasks, rewards, and the worker processes that compute rewards; imports no jax."""

from jaxrl_post.envs.catalog import make
from jaxrl_post.envs.env import (
    AgentEnvironment,
    Answer,
    Environment,
    Message,
    NeedsPreparation,
    NeedsTrial,
    NeedsTurns,
    Repeats,
    Session,
    StatefulEnvironment,
    StatelessEnvironment,
    Step,
    Task,
    TaskSequence,
    ToolCall,
    player_url,
    response,
)
from jaxrl_post.envs.workers.pool import Judgement, WorkerPool, WorkerStartError

__all__ = [
    "AgentEnvironment",
    "Answer",
    "Environment",
    "Judgement",
    "Message",
    "NeedsPreparation",
    "NeedsTrial",
    "NeedsTurns",
    "Repeats",
    "Session",
    "StatefulEnvironment",
    "StatelessEnvironment",
    "Step",
    "Task",
    "TaskSequence",
    "ToolCall",
    "WorkerPool",
    "WorkerStartError",
    "make",
    "player_url",
    "response",
]
