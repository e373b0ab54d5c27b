"""The options of sampling and judging."""

import importlib.util
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import (
    COUNT,
    FREE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
)
from jaxrl_post.envs.workers.hosts import check_hosts

__all__ = ["CacheDtype", "RolloutConfig", "WeightsDtype", "check_judges"]

CacheDtype = Literal["int8", "float8"]
WeightsDtype = Literal["int8", "float8"]


@dataclass(frozen=True)
class RolloutConfig:
    """How samples are drawn and judged.

    Attributes:
        mesh: mesh of the sampler, on the devices of --mesh; "" for the same mesh, on
            which the sampler uses the trainer's own arrays. On another mesh it has a
            copy of the parameters, made anew for every step. Where --mesh has fsdp, a
            mesh of dp and tp decodes without gathering the weights for every token.
        dtype: dtype of the sampler's parameters; None for that of --dtype.
        publish_mib: with another mesh or dtype, most MiB of parameters that are moved
            at a time; it bounds the temporary memory.
        prompts_per_step: prompts, each with a group of samples, in the batch of a step.
        samples_per_prompt: samples of a prompt, which form its group.
        max_prompt_tokens: most tokens of a prompt; 0 for those of the environment's
            longest. Tasks with a longer prompt are left out, and counted.
        max_tokens: most tokens of a completion, the stop token included.
        max_turns: most turns of the policy in an episode; an environment that would go
            on is ended there. More than one needs `max_prompt_tokens`, which bounds the
            conversation before the last turn.
        max_result_tokens: most tokens of what a tool returned to the policy; a longer
            result loses its middle, and says so.
        partial: groups that may be unfinished when a step is taken. Then so many more
            prompts are under way than a step needs, it takes the first groups that
            finish, and the others go on under the next parameters. 0 waits for all.
        recompute_cache: whether samples that go on under the next parameters compute
            the keys and values of their tokens again. Without it they keep those of the
            earlier parameters until an evaluation or a checkpoint: it saves a prefill
            of each, but what is sampled then is no version's policy, and
            `algorithm.correction` has more to correct.
        temperature: sampling temperature, at least 1e-5. It is part of the policy that
            is trained; generation_config.json is not read.
        top_k: sample from the k most probable tokens alone; 0 for all.
        top_p: sample from the smallest set of most probable tokens with this
            probability in total; 1 for all.
        min_p: sample from the tokens with at least this share of the top token's
            probability; 0 for all.
        stop_strings: texts of which any ends a completion, with the token that
            completes it.
        num_slots: number of samples that decode at once; 0 for all samples of a step,
            with those of `partial`.
        steps_per_call: tokens that each sample decodes between two looks of the host; 0
            chooses.
        cache_tokens: tokens, over all devices, whose keys and values the sampler holds;
            samples wait while its cache is full. What the samples of a prompt share
            counts once; what is left keeps earlier turns. 0 for what all slots need.
        cache_dtype: how the sampler holds keys and values. int8, float8 (e4m3): a byte
            each, with a float32 scale per token and head; None for the dtype of its
            parameters. It changes what is sampled a little, so sampler and trainer
            differ by more: keep an `algorithm.correction`, as by default.
        weights: how the sampler holds the matrices of attention, MLPs and experts.
            int8, float8 (e4m3): a byte each, with a float32 scale per output, made from
            the trainer's parameters once a step; None for these themselves. With an
            adapter its base is held so. It changes what is sampled, as `cache_dtype`.
        guesses: tokens that the sampler guesses for each sample in a forward pass, from
            what followed the same tokens earlier in the sample or its prompt, or by
            `draft`; 0 for none. Right guesses save passes, and samples stay as they
            are. It pauses where guesses are seldom right.
        guess_rows: most rows of a forward pass with guesses: samples that decode, times
            1 + `guesses`.
        draft: Hugging Face directory of a smaller model with the same tokens, which
            guesses, or ORG/NAME on the hub (ORG/NAME@REVISION for a revision). It is
            not trained.
        dynamic_sampling: draw prompts until `prompts_per_step` groups have rewards that
            differ (DAPO), or of which a turn's do, where turns are credited, or a part
            that counts, of gdpo; groups beyond that wait for the next step.
        truncated: reward of an answer that was cut at `max_tokens`. zero: 0, whatever
            stands in it; reward: what the environment says; mask: it is not trained on,
            but its group is still compared with it (DAPO's overlong filter).
        overlong_buffer: tokens before `max_tokens` over which a completion's reward
            falls linearly, by up to `overlong_penalty` (DAPO); 0 for no penalty. Of
            several turns the longest one counts, since `max_tokens` is of a turn.
        overlong_penalty: reward that a completion of `max_tokens` tokens loses.
        max_draws: with dynamic sampling, most prompts drawn for a step, as a multiple
            of `prompts_per_step`; after that the step takes the groups that it has.
        judges: where answers are judged. local: in processes of this machine; ray: on
            the Ray cluster that is there, or else one on this machine; ray:HOST:PORT:
            on the nodes of that cluster; ray:local: always on one of this machine.
        reward_workers: number of processes that judge answers.
        reward_cpus: with judges on a Ray cluster, CPUs reserved for each process.
        serve: address at which agents reach the sampler, for an environment of agents
            (`envs.AgentEnvironment`); with port 0 a free one.
        reward_deadline_s: most seconds for one judgement; of an environment of agents
            for one episode.
        reward_memory_gib: most GiB of address space of a process that judges; a step
            that needs more fails. None for no limit.
        reward_grace_s: with `partial`, seconds for which decoding waits for the next of
            the judgements of the turns that have just ended. While each comes within it
            a run can be repeated to the last bit; a slower one is not waited for again.
        max_failed_share: share of a step's rollouts that may fail; the run stops if
            more do.
        deadline_s: most seconds for all rollouts of a step.
    """

    mesh: Annotated[str, FREE] = ""
    dtype: Literal["float32", "bfloat16"] | None = None
    publish_mib: Annotated[int, COUNT, FREE] = 1024
    prompts_per_step: Annotated[int, COUNT] = 32
    samples_per_prompt: Annotated[int, COUNT] = 8
    max_prompt_tokens: Annotated[int, NOT_NEGATIVE] = 0
    max_tokens: Annotated[int, COUNT] = 256
    max_turns: Annotated[int, COUNT] = 1
    max_result_tokens: Annotated[int, COUNT] = 1024
    partial: Annotated[int, NOT_NEGATIVE] = 0
    recompute_cache: bool = True
    temperature: Annotated[float, Range(1e-5)] = 1.0
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    top_p: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    min_p: Annotated[float, SHARE] = 0.0
    stop_strings: tuple[str, ...] = ()
    num_slots: Annotated[int, NOT_NEGATIVE] = 0
    steps_per_call: Annotated[int, NOT_NEGATIVE] = 0
    cache_tokens: Annotated[int, NOT_NEGATIVE] = 0
    cache_dtype: CacheDtype | None = None
    weights: WeightsDtype | None = None
    guesses: Annotated[int, NOT_NEGATIVE] = 0
    guess_rows: Annotated[int, COUNT] = 32
    draft: str | None = None
    dynamic_sampling: bool = False
    truncated: Literal["reward", "zero", "mask"] = "zero"
    overlong_buffer: Annotated[int, NOT_NEGATIVE] = 0
    overlong_penalty: Annotated[float, NOT_NEGATIVE] = 1.0
    max_draws: Annotated[int, COUNT] = 4
    judges: Annotated[str, FREE] = "local"
    reward_workers: Annotated[int, COUNT, FREE] = 1
    reward_cpus: Annotated[float, POSITIVE, FREE] = 1.0
    serve: Annotated[str, FREE] = "127.0.0.1:0"
    reward_deadline_s: Annotated[float, POSITIVE, FREE] = 10.0
    reward_memory_gib: Annotated[float | None, POSITIVE, FREE] = None
    reward_grace_s: Annotated[float, NOT_NEGATIVE, FREE] = 0.25
    max_failed_share: Annotated[float, SHARE, FREE] = 0.25
    deadline_s: Annotated[float, POSITIVE, FREE] = 3600.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn.

        >>> RolloutConfig(top_p=0.9).truncates, RolloutConfig().truncates
        (True, False)
        """
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def check_judges(judges: str, reward_cpus: float, section: str) -> None:
    """Refuses judges that are nowhere, and CPUs that nobody reserves.

    Args:
        judges: the option of this name, as `check_hosts` has it.
        reward_cpus: the option of this name.
        section: of both options, such as "rollout.", for messages.

    Raises:
        ConfigError: names the option.

    >>> check_judges("slurm", 1.0, "rollout.")
    Traceback (most recent call last):
    jaxrl_post.config.errors.ConfigError: --rollout.judges: must be ... got 'slurm'
    """
    try:
        check_hosts(judges)
    except ValueError as error:
        raise ConfigError(f"--{section}judges: {error}") from error
    if judges == "local" and reward_cpus != RolloutConfig.reward_cpus:
        raise ConfigError(
            f"--{section}reward-cpus: processes of this machine reserve no CPUs; got "
            f"{reward_cpus:g}; drop the option, or give --{section}judges ray"
        )
    if judges != "local" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"--{section}judges {judges}: there is no module 'ray': "
            "pip install 'jaxrl_post[ray]'"
        )
