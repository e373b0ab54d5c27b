"""An agent of the framework pydantic-ai, which knows nothing of training."""

from dataclasses import dataclass

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from jaxrl_post.envs import Step, Task
from tests.programs.agent_letters import Letters, share


@dataclass(frozen=True)
class Conversing(Letters):
    """Two turns of a conversation that the framework keeps; even digits pay."""

    name: str = "conversing"

    def run(self, task: Task, base_url: str) -> Step:
        provider = OpenAIProvider(base_url=base_url, api_key="none")
        agent = Agent(OpenAIChatModel("policy", provider=provider), retries=0)
        said: list[str] = []
        history = None
        for question in (task.messages[0].content, "1="):
            try:
                result = agent.run_sync(question, message_history=history)
            except (ModelHTTPError, UnexpectedModelBehavior):
                break  # It takes no empty answer.
            said.append(result.output)
            history = result.all_messages()
        return Step(sum(map(share, said)), done=True, metrics={"said": len(said)})
