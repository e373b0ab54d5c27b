"""A language model as the judge of answers, behind OpenAI's chat API."""

from jaxrl_post.envs.judges.endpoint import ChatEndpoint, JudgeError
from jaxrl_post.envs.judges.environment import Judged
from jaxrl_post.envs.judges.judge import Judge, Verdict

__all__ = ["ChatEndpoint", "Judge", "JudgeError", "Judged", "Verdict"]
