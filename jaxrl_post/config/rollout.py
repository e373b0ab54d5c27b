"""The options of sampling and judging."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import (
    ANY,
    COUNT,
    FREE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
)
from jaxrl_post.config.run import address_of
from jaxrl_post.envs.workers.hosts import check_hosts
from jaxrl_post.extras import install

__all__ = [
    "CacheDtype",
    "FleetConfig",
    "RolloutConfig",
    "WeightsDtype",
    "check_address",
    "check_judges",
    "expected_samplers",
]

_ANY = re.compile(r"any:([1-9][0-9]{0,4})")

CacheDtype = Literal["int8", "float8"]
WeightsDtype = Literal["int8", "float8"]


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling and judging of a step's rollouts.

    A rollout is the work on one prompt from its first sampled token until all of its
    samples are judged. The buffer is the set of judged groups that wait for a step. To
    publish a version is to give the sampler its parameters. To stage a version is to
    move its parameters to the sampler's devices, layout and dtype before they are used.

    Attributes:
        mesh: mesh of the sampler, on the devices of --mesh; "" for the same mesh, on
            which the sampler uses the trainer's own arrays. On another mesh it has a
            copy of the parameters, made again for every step. Where --mesh has fsdp, a
            mesh of dp and tp decodes without gathering the weights for every token.
            With --samplers, the mesh of each sampler on its own devices.
        ahead: steps by which sampling is ahead of training: all samples of step t are
            drawn with the parameters with which step t - `ahead` begins; the first
            steps use the initial parameters. 0 for the step's own parameters. With
            --samplers and 1, the samples of the next step are drawn while a step
            trains.
        dtype: dtype of the sampler's parameters; None for --dtype.
        publish_mib: with another mesh or dtype, most MiB of parameters that are moved
            at a time; bounds the temporary memory.
        prompts_per_step: prompts, each with a group of samples, in the batch of a step.
        samples_per_prompt: samples of a prompt, which form its group.
        max_prompt_tokens: most tokens of a prompt; 0 for the length of the
            environment's longest. Tasks with a longer prompt are left out and counted.
        max_tokens: most tokens of a completion, the stop token included.
        max_turns: most turns of the policy in an episode; a longer episode is ended
            there. More than one needs `max_prompt_tokens`, which bounds the
            conversation before the last turn.
        max_result_tokens: most tokens of a tool's result; a longer one loses its
            middle, and a note in it says so.
        partial: groups that may be unfinished when a step starts training. So many more
            prompts than a step needs are sampled at once; the step takes the oldest
            groups that have finished, once there are enough, and the next parameters
            continue the others. 0 waits for all.
        staleness: with `partial`, most steps by which the parameters that begin a group
            are older than those that train on it: at least `ahead`, and one more for
            each `prompts_per_step` groups of `partial`, or part of as many. A step
            waits for a group that would be older; none is dropped. None for no bound.
        recompute_cache: with `partial`, computes the keys and values of unfinished
            samples again under the new parameters. Without it they keep the old keys
            and values until an evaluation or a checkpoint: this saves a prefill of
            each, but the samples then follow no version's policy, and
            `algorithm.correction` has more to correct.
        temperature: sampling temperature, at least 1e-5. It is part of the policy that
            is trained; generation_config.json is not read.
        top_k: sample from the k most probable tokens; 0 for all.
        top_p: sample from the smallest set of most probable tokens with this
            probability in total; 1 for all.
        min_p: sample from the tokens with at least this share of the top token's
            probability; 0 for all.
        stop_strings: texts that end a completion; it ends with the token that completes
            one of them.
        num_slots: number of samples that decode at once; 0 for all samples of a step,
            `partial` groups included.
        steps_per_call: tokens that each sample decodes in a burst, before the host
            looks at the results; 0 chooses.
        cache_tokens: tokens, over all devices, whose keys and values the sampler holds;
            samples wait while its cache is full. Tokens that a prompt's samples share
            count once; spare room keeps earlier turns. 0 for as many as all slots need.
        cache_dtype: how the sampler holds keys and values. int8, float8 (e4m3): a byte
            each, with a float32 scale per token and head; None for the dtype of its
            parameters. It changes what is sampled a little, so sampler and trainer
            differ by more: keep an `algorithm.correction`, as by default.
        weights: how the sampler holds the matrices of attention, MLPs and experts.
            int8, float8 (e4m3): a byte each, with a float32 scale per output, made from
            the trainer's parameters once per step; None for the trainer's own matrices.
            With an adapter this applies to its base. It changes what is sampled, as
            `cache_dtype` does.
        router_replay: gives each token in training the experts that it had in the
            sampler (arXiv:2510.11370); their weights come from the trainer's routers.
            Rounding lets sampler and trainer choose different experts, and then their
            log-probs differ by much. Costs the sampler two bytes for each expert of a
            token in each layer, on the host.
        guesses: tokens that the sampler guesses for each sample in a forward pass, from
            what followed the same tokens earlier in the sample or its prompt, or by
            `draft`; 0 for none. Right guesses save passes; the samples do not change.
            Guessing pauses where guesses are seldom right.
        guess_rows: most rows of a forward pass with guesses: decoding samples times 1 +
            `guesses`.
        draft: smaller model with the same tokens that makes the guesses: a Hugging Face
            directory, or ORG/NAME on the hub (ORG/NAME@REVISION for a revision). It is
            not trained.
        mtp: makes the guesses with the model's own layer for multi-token prediction, as
            it is in the model's directory (Qwen3-Next, Qwen3.5). It is not trained.
        dynamic_sampling: draw prompts until `prompts_per_step` groups have rewards that
            differ (DAPO); with turn credit, rewards of a turn that differ; with gdpo, a
            weighted part that differs. Further groups wait for the next step.
        group_reward_low: with dynamic sampling, keeps only the groups whose mean reward
            is above this. With rewards of 0 and 1 the mean is the group's accuracy, and
            PRIME keeps 0.2 to 0.8. None for no bound.
        group_reward_high: keeps only the groups whose mean reward is below this; None
            for no bound.
        truncated: reward of an answer that was cut at `max_tokens`, in training and in
            evaluations. reward: the environment's reward; zero: at most 0; mask: the
            environment's, but the answer is not trained on; it still counts in its
            group's baseline (DAPO's overlong filter).
        overlong_buffer: tokens before `max_tokens` over which a completion's reward
            falls linearly, by up to `overlong_penalty` (DAPO); 0 for no penalty. With
            several turns the longest one counts, since `max_tokens` is of a turn.
        overlong_penalty: penalty at `max_tokens` tokens, subtracted from the reward.
        max_draws: with dynamic sampling, most prompts drawn for a step, as a multiple
            of `prompts_per_step`; then the step takes the groups that it has.
        judges: where answers are judged. local: in processes on this machine; ray: on
            the Ray cluster that is running, else on one started on this machine;
            ray:HOST:PORT: on the nodes of that cluster; ray:local: always on one
            started on this machine.
        reward_workers: number of processes that judge answers.
        reward_cpus: with judges on a Ray cluster, CPUs reserved for each process.
        serve: address at which agents reach the sampler, for an environment with agents
            (`envs.AgentEnvironment`); port 0 takes a free one.
        reward_deadline_s: most seconds for one judgement, or with agents for one
            episode; with `partial` this includes the steps that an agent waits for.
        reward_memory_gib: most GiB of address space of a judging process; a judgement
            that needs more fails. None for no limit.
        reward_grace_s: with `partial`, seconds for which decoding waits for each
            judgement of the turns that have just ended. While each comes in time a run
            can be repeated to the last bit; a slower one is not waited for again.
        max_failed_share: share of a step's rollouts that may fail; if more fail, the
            run stops.
        deadline_s: most seconds for all rollouts of a step.
    """

    mesh: Annotated[str, FREE] = ""
    ahead: Annotated[int, NOT_NEGATIVE] = 0
    dtype: Literal["float32", "bfloat16"] | None = None
    publish_mib: Annotated[int, COUNT, FREE] = 1024
    prompts_per_step: Annotated[int, COUNT] = 32
    samples_per_prompt: Annotated[int, COUNT] = 8
    max_prompt_tokens: Annotated[int, NOT_NEGATIVE] = 0
    max_tokens: Annotated[int, COUNT] = 256
    max_turns: Annotated[int, COUNT] = 1
    max_result_tokens: Annotated[int, COUNT] = 1024
    partial: Annotated[int, NOT_NEGATIVE] = 0
    staleness: Annotated[int | None, COUNT] = None
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
    router_replay: bool = False
    guesses: Annotated[int, NOT_NEGATIVE] = 0
    guess_rows: Annotated[int, COUNT] = 32
    draft: str | None = None
    mtp: bool = False
    dynamic_sampling: bool = False
    group_reward_low: Annotated[float | None, ANY] = None
    group_reward_high: Annotated[float | None, ANY] = None
    truncated: Literal["reward", "zero", "mask"] = "reward"
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
    """Refuses an unknown place for judges, and CPUs that only Ray could reserve.

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
            f"--{section}judges {judges}: there is no module 'ray': {install('ray')}"
        )


@dataclass(frozen=True)
class FleetConfig:
    """Samplers in other processes, of `samplers` any:N.

    Attributes:
        listen: HOST:PORT at which samplers reach this trainer; an address outside this
            machine's loopback needs `key_file`.
        least: samplers that must be ready once the run has begun; with fewer it waits.
            The first sample is drawn when as many are ready as `samplers` names.
        wait_s: most seconds for which it waits; then it ends, and its last checkpoint
            is whole.
        silence_s: seconds without a word from a sampler after which others take its
            samples. A connection that breaks is noticed at once.
        key_file: file with the key that samplers must send; None asks for none.
    """

    listen: str = "127.0.0.1:7777"
    least: Annotated[int, COUNT] = 1
    wait_s: Annotated[float, POSITIVE] = 3600.0
    silence_s: Annotated[float, POSITIVE] = 10.0
    key_file: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`.

        Raises:
            ConfigError: it is no HOST:PORT.

        >>> FleetConfig("[::1]:0").address
        ('::1', 0)
        """
        return address_of(self.listen, "--fleet.listen")

    @property
    def key(self) -> str | None:
        """The key that samplers must send; None for none.

        Raises:
            ConfigError: the file is missing or empty.
        """
        return None if self.key_file is None else _read_key(self.key_file)


def expected_samplers(given: int | str) -> int:
    """Returns how many samplers in other processes `--samplers` names.

    Raises:
        ConfigError: the option is neither a number nor any:N.

    >>> expected_samplers(2), expected_samplers("any:3")
    (0, 3)
    """
    if isinstance(given, int):
        if given < 0:
            raise ConfigError(f"--samplers: must be at least 0; got {given}")
        return 0
    found = _ANY.fullmatch(given)
    if found is None:
        raise ConfigError(
            "--samplers: must be a number of samplers on devices of this process, or "
            f"any:N for samplers in N other processes, such as any:2; got {given!r}"
        )
    return int(found[1])


def check_address(config: FleetConfig) -> None:
    """Refuses an address that others could reach without a key.

    Raises:
        ConfigError: names the option.
    """
    host, _ = config.address
    if config.key is None and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"--fleet.listen: {host} can be reached from other machines, where anybody "
            "could read the parameters and send samples; give --fleet.key-file, or "
            "listen on 127.0.0.1"
        )


def _read_key(file: str) -> str:
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--fleet.key-file: cannot read {file}: {error}") from error
    if not key:
        raise ConfigError(f"--fleet.key-file: {file} is empty")
    return key
