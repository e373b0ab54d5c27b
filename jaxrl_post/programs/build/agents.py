"""Opens the server that agents call while a run trains."""

import contextlib
import ipaddress
from collections.abc import Iterator

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.lengths import Lengths
from jaxrl_post.data.tools import expresses_tools, form_of
from jaxrl_post.envs import AgentEnvironment, Environment, NeedsTurns, WorkerPool
from jaxrl_post.learner.model import Model
from jaxrl_post.rollout.collector import EpisodeSource
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sharding import processes

__all__ = ["check_agents", "open_agents"]

# Seconds for one answer; an episode's own deadline is its agent's.
ANSWER_S = 3600.0


def check_agents(
    environment: Environment, config: RLConfig, *, sums_rewards: bool = False
) -> None:
    """Refuses options with which no agent can call; before the warm start.

    Args:
        environment: of the run; only an `AgentEnvironment` has agents.
        config: of the run.
        sums_rewards: whether the algorithm sums rewards along a sequence.

    Raises:
        ConfigError: several processes or machines, `--reward.model`, a credit of turns
            that cannot follow branches, too few turns for an episode, or an address
            that others can reach; or, without agents, an address.
    """
    if not isinstance(environment, AgentEnvironment):
        if config.rollout.serve != RolloutConfig().serve:
            raise ConfigError(
                f"--rollout.serve {config.rollout.serve}: agents reach the sampler "
                f"there, and {config.env} has none; drop the option, or serve a "
                "model with launch.serve"
            )
        return
    if processes.count() > 1:
        raise ConfigError(
            "--env: agents call a server of one process, and this run has "
            f"{processes.count()}; start one"
        )
    if config.reward.model is not None:
        raise ConfigError(
            "--reward.model: reads an answer to a task's prompt, and an agent writes "
            "its prompts itself; drop the option"
        )
    if config.rollout.judges != "local":
        raise ConfigError(
            "--rollout.judges: agents reach the sampler on this machine's loopback, "
            f"which agents on {config.rollout.judges} cannot; take local"
        )
    options = config.algorithm
    if options.turn_credit == "turns" and sums_rewards:
        raise ConfigError(
            f"--algorithm.turn-credit turns: {options.name} sums rewards along a "
            "sequence, and where an agent branches a turn stands in one sequence and "
            "rewards that follow from it in others; use outcome, or an algorithm such "
            "as grpo"
        )
    turns = config.rollout.max_turns
    if isinstance(environment, NeedsTurns) and turns < environment.most_calls:
        raise ConfigError(
            f"--rollout.max-turns: an episode of {environment.name} may need "
            f"{environment.most_calls} calls; got {turns}; raise it to "
            f"{environment.most_calls}"
        )
    _address(config.rollout.serve)


@contextlib.contextmanager
def open_agents(
    config: RLConfig, model: Model, judges: WorkerPool, sampler: Sampler
) -> Iterator[EpisodeSource]:
    """The episodes of an `AgentEnvironment`, with its server until the block ends.

    Args:
        config: of the run; `check_agents` has accepted it.
        model: the trained model.
        judges: run the agents.
        sampler: the run's, without parameters.

    Raises:
        ConfigError: an address that others can reach or that is taken, or the extra
            serve is missing.
    """
    try:
        from jaxrl_post.serve.agents import Agents, AgentServer
        from jaxrl_post.serve.calls import Served
        from jaxrl_post.serve.grammars.compiler import Grammars
        from jaxrl_post.serve.service import Service
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--env: an environment of agents needs the extra serve ({error}); pip "
            "install 'jaxrl_post[serve]'"
        ) from error
    host, port = _address(config.rollout.serve)
    tokenizer, rollout = model.tokenizer, config.rollout
    served = Served(
        # Each round binds the sampler with the parameters of its step.
        service=Service(sampler, max_samples=2**20),
        tokenizer=tokenizer,
        grammars=Grammars(tokenizer, model.config.vocab_size),
        form=form_of(tokenizer),
        name="policy",
        max_model_len=rollout.max_prompt_tokens + rollout.max_tokens,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_tokens=rollout.max_tokens,
        defaults=SamplingParams(),
        timeout_s=ANSWER_S,
        tools=expresses_tools(tokenizer),
        lengths=Lengths.of(tokenizer),
    )
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(AgentServer.listening(served, host, port))
        except OSError as error:
            raise ConfigError(
                f"--rollout.serve: cannot listen on {config.rollout.serve}: {error}"
            ) from error
        yield Agents(server, judges, rollout.max_turns)


def _address(text: str) -> tuple[str, int]:
    """Host and port of `--rollout.serve`."""
    host, _, port = text.rpartition(":")
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            "--rollout.serve: must be an address of this machine's own loopback, such "
            f"as 127.0.0.1:8000, or port 0 for a free one; got {text!r}"
        )
    return host.strip("[]"), int(port)
