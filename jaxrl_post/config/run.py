"""The options that all training programs share, and which a resumed run may change."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxrl_post.config.data import TemplateConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import (
    ANY,
    COUNT,
    FREE,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    fields_of,
)
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.specs import check_takes, imported

__all__ = [
    "CheckpointConfig",
    "CompileCacheConfig",
    "EvalConfig",
    "ProcessesConfig",
    "RetriesConfig",
    "RunConfig",
    "TrackerName",
    "UpdateConfig",
    "WarmStartConfig",
    "WatchConfig",
    "address_of",
    "differences",
    "flattened",
    "loaded_callbacks",
    "profiled_steps",
]

TrackerName = Literal["tensorboard", "wandb", "trackio"]


# A model's vision tower in a run: not loaded, loaded, or trained too.
Vision = Literal["off", "frozen", "trained"]


@dataclass(frozen=True)
class UpdateConfig:
    """Options for turning a batch into optimizer steps.

    A step of a run is one batch, sampled or read, and the training on it. An update is
    one optimizer step, on one minibatch; a step takes minibatches * epochs updates.

    Attributes:
        minibatches: parts of a batch; each serves one optimizer step of a pass.
        epochs: passes over a batch, so that a step of the run takes minibatches *
            epochs optimizer steps.
        trees: pack and train shared prefixes once: the prompt of a group's samples, the
            question of a pair, the turns before an agent's branches. Without it, each
            sequence is packed whole.
        microbatch_tokens: most tokens, padding included, of one forward and backward
            pass; gradients of the microbatches are summed. Fewer need less memory. A
            device's share is one packed row, as short as the batch allows; a longer
            sequence makes it longer.
        remat: rematerialisation: what a layer keeps of the forward pass for the
            backward pass, which computes the rest again. "none" keeps all; "dots",
            results of matrix products; "full", nothing, which needs the least memory.
        scan_layers: compile repeated layers once, as a loop: deep models compile in a
            fraction of the time and memory, but each forward pass copies the layers.
        precision: of the matrix products of attention, MLPs and experts, forward and
            backward. float8: operands are rounded to a byte (e4m3, and gradients to
            e5m2), with a scale per row or column; sums, parameters, router and head
            keep their dtypes. None for the parameters' dtype. Sample with
            `rollout.weights` float8 too: the sampler then rounds as the trainer does.
        stage_rounds: with pp in `mesh`, how many chunks of layers a pipeline stage has.
            More let stages wait less, and pass activations more often. None for as many
            as the model's layers allow.
        stage_groups: with pp, packed rows of a device in one pass. More let stages wait
            less, and each takes the memory of a row's activations.
        router_balance: weight of the load-balancing loss of a mixture of experts; 0 for
            none.
        router_z: weight of the z-loss of a mixture of experts' routers; 0 for none.
    """

    minibatches: Annotated[int, COUNT] = 1
    epochs: Annotated[int, COUNT] = 1
    trees: Annotated[bool, FREE] = True
    microbatch_tokens: Annotated[int, COUNT, FREE] = 4096
    remat: Annotated[Literal["none", "dots", "full"], FREE] = "none"
    scan_layers: Annotated[bool, FREE] = False
    precision: Literal["float8"] | None = None
    stage_rounds: Annotated[int | None, COUNT, FREE] = None
    stage_groups: Annotated[int, COUNT, FREE] = 1
    router_balance: Annotated[float, NOT_NEGATIVE] = 0.0
    router_z: Annotated[float, NOT_NEGATIVE] = 0.0


@dataclass(frozen=True)
class EvalConfig:
    """Options of evaluations on held-out tasks, demonstrations or pairs.

    Sampling programs answer each task once, greedily.

    Attributes:
        every: steps of the run between evaluations; 0 for only the first and last step.
        num_tasks: number of held-out tasks, demonstrations or pairs that are evaluated.
        solved_reward: an answer with at least this reward solves its task; accuracy is
            the share of solved tasks, eval/reward the mean reward.
        graders: of sampling programs, other measures of the answers than the reward,
            which train nothing: each NAME=ENVIRONMENT, an environment with the tasks of
            `env`, such as strict=jsonl?grader=exact or
            mine=jsonl?grader=<module>:<function>. They grade the held-out answers and
            some training samples; a rule tells when they and the reward part.
        graded_samples: most training samples of a step that are graded; 0 for none.
    """

    every: Annotated[int, NOT_NEGATIVE] = 25
    num_tasks: Annotated[int, COUNT] = 128
    solved_reward: Annotated[float, ANY] = 1.0
    graders: tuple[str, ...] = ()
    graded_samples: Annotated[int, NOT_NEGATIVE] = 32

    def due(self, step: int, steps: int) -> bool:
        """Whether step `step` of a run of `steps` steps ends with an evaluation."""
        return step == steps or (self.every > 0 and step % self.every == 0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Options for saving checkpoints, for keeping the best model and for ending early.

    Attributes:
        every: steps of the run between checkpoints; the last step is always saved.
        keep: number of checkpoints kept, the newest ones.
        keep_best: metric of the evaluations, such as eval/accuracy or eval/loss: the
            model with its best value is written to `best` in the run directory, and its
            step and value to best.json. The step has a checkpoint too. None for no such
            model.
        best_is: whether the highest or the lowest value is the best one; auto does what
            the table of metrics says, such as lowest for eval/loss.
        patience: evaluations in a row without a better value of `keep_best`, after
            which the run ends, as complete; the one before the first step does not
            count. A larger value continues such a run. None to take all steps.
        min_delta: how much better than the best one a value must be so that `patience`
            counts from there; the best model is kept in any case.
    """

    every: Annotated[int, COUNT] = 25
    keep: Annotated[int, COUNT] = 2
    keep_best: str | None = None
    best_is: Literal["auto", "highest", "lowest"] = "auto"
    patience: Annotated[int | None, COUNT] = None
    min_delta: Annotated[float, NOT_NEGATIVE] = 0.0


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps that a preset takes before reinforcement learning.

    A randomly initialised model writes noise, which always gets the same reward; a few
    supervised steps teach it what an answer looks like. A model that is loaded from a
    directory gets no warm start.

    Attributes:
        steps: optimizer steps; 0 for none.
        examples_per_step: demonstrations in the batch of a step.
        learning_rate: peak learning rate of these steps.
    """

    steps: Annotated[int, NOT_NEGATIVE] = 0
    examples_per_step: Annotated[int, COUNT] = 64
    learning_rate: Annotated[float, POSITIVE] = 2e-3


@dataclass(frozen=True)
class WatchConfig:
    """The rules that the metrics of every step are held against (docs/watch.md).

    Attributes:
        rules: file of rules, TOML or JSON, that are added to the default ones; a table
            with the name of a rule changes it, such as its bound, or its action: warn,
            keep, pause or stop.
        off: names of rules that are not used; "all" for none.
        webhook: file whose first line is a URL to which alarms are posted as JSON. The
            URL is a secret, so it is no option.
        listen: HOST:PORT of a page that follows the run, as launch.watch serves it;
            GET /metrics has the newest metrics and alarms for Prometheus. The page has
            no password. None for no server. Needs the extra serve.
        pause_s: longest pause of a rule whose action is pause, in seconds; the run then
            saves and ends.
    """

    rules: str | None = None
    off: tuple[str, ...] = ()
    webhook: str | None = None
    listen: str | None = None
    pause_s: Annotated[float, POSITIVE] = 3600.0

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of `listen`; None without a server.

        Raises:
            ConfigError: it is no HOST:PORT.
        """
        return (
            None if self.listen is None else address_of(self.listen, "--watch.listen")
        )


@dataclass(frozen=True)
class ProcessesConfig:
    """The processes of a run, which execute the same command, one or more per host.

    Under Slurm, Open MPI, Cloud TPU and GKE all of them are found automatically.

    Attributes:
        coordinator: HOST:PORT at which process 0 listens.
        count: number of processes.
        index: index of this process, from 0.
        deadline_s: seconds in which all processes must have been started.
    """

    coordinator: str | None = None
    count: Annotated[int | None, COUNT] = None
    index: Annotated[int | None, NOT_NEGATIVE] = None
    deadline_s: Annotated[float, POSITIVE] = 300.0


@dataclass(frozen=True)
class RetriesConfig:
    """Seconds in which a run tries again after errors of a machine, not of data.

    A signal ends each wait; 0 turns one off. Several processes wait for room on a full
    disk 300 s at most, and only before a checkpoint and for their logs.

    Attributes:
        disk_s: seconds that a write waits for room on a full disk.
        trackers_s: seconds in which the rows for wandb or trackio are kept and sent
            again while the tracker fails; then it is told nothing more.
        judges_s: seconds in which a step or an evaluation is rolled out again if too
            many of its rollouts failed since a server of the environment was away. Not
            with `rollout.partial`.
    """

    disk_s: Annotated[float, NOT_NEGATIVE] = 600.0
    trackers_s: Annotated[float, NOT_NEGATIVE] = 600.0
    judges_s: Annotated[float, NOT_NEGATIVE] = 600.0


@dataclass(frozen=True)
class CompileCacheConfig:
    """The place of compiled programs, which the next start need not compile again.

    Attributes:
        path: "auto", the directory of JAX_COMPILATION_CACHE_DIR as it is if that is
            set, else jaxrl_post/xla below $XDG_CACHE_HOME or ~/.cache; "off", no cache;
            or another directory. Users who can write there can have this program
            execute their code. Several processes use a directory that all of them see;
            on GPUs "auto" is then "off".
        max_gib: most GiB of compiled programs at the start of this one: those that were
            not used for longest are removed. It does not bound a directory of
            JAX_COMPILATION_CACHE_DIR.
    """

    path: str = "auto"
    max_gib: Annotated[float, POSITIVE] = 5.0


@dataclass(frozen=True)
class RunConfig:
    """The options that all training programs share.

    Attributes:
        run_dir: directory of the run: configuration, logs, checkpoints, model and
            report; None for a directory under runs/ that is named after algorithm,
            environment and model.
        resume: continue from the newest checkpoint in `run_dir`, if there is one.
        seed: seed of the initial weights, the order of the data and the sampling noise.
        mesh: how many devices each axis of the mesh has, such as "dp4,tp8" (axes: pp,
            dp, fsdp, ep, cp, tp); by default all devices are on dp.
        model: a Hugging Face directory, ORG/NAME on the hub, a preset with random
            weights: demo, tiny, small, or a published size such as qwen3-0.6b
            (jaxrl_post.pretrained.presets), or an adapter of PEFT. An adapter is merged
            into its base first, with `lora` too, which trains a new one on top;
            `lora.path` continues one.
        base: model under an adapter; None for the one that the adapter names.
        revision: branch, tag or commit of a --model on the hub.
        dtype: dtype of the parameters; None for the checkpoint's own, float32 for a
            preset.
        vision: whether the model gets the pictures of messages, by its vision tower:
            "off", its text model alone is trained, and saved; "frozen", the tower stays
            as it is; "trained", it is trained too.
        steps: length of the run in steps; each step learns from one batch, sampled or
            read.
        epochs: length of the run in passes over the training tasks, examples or pairs,
            instead of `steps`, rounded up to whole steps. None for `steps`.
        update: how a batch becomes optimizer steps.
        optimizer: AdamW or another one, and its learning rate.
        eval: when and on what the model is evaluated.
        checkpoint: when the run is saved.
        warm_start: supervised steps of a preset.
        lora: adapter to train instead of the whole model.
        template: variables and date for the chat template.
        kernels: what computes attention and the trainer's log-probs: "auto", the Pallas
            kernels on TPUs and Hopper GPUs where they take the dtype and the sizes, and
            XLA programs elsewhere; "xla", XLA programs; "pallas_tpu" and "pallas_gpu",
            the kernels for TPUs and for Hopper GPUs, or an error.
        log: trackers that get the metrics, in addition to metrics.jsonl: tensorboard,
            wandb, trackio.
        log_project: project in wandb and trackio; None for their default.
        push_to_hub: ORG/NAME of a repository on the Hugging Face hub, to which the
            model is uploaded at the end, with checkpoint.keep_best the best one; it is
            made before the first step. None to upload nothing.
        push_public: make that repository public instead of private.
        profile: step that is traced, such as 3, or the first and the last one, such as
            10:12; the trace, for xprof and Perfetto, is in the folder profile. None for
            no trace.
        watch: rules that tell what is wrong with a run.
        callbacks: functions, each a <module>:<function>, that are called at the start,
            after each step and each evaluation, and at the end.
        processes: the processes of the run, if there are several.
        retries: what is tried again after errors of a machine, and for how long.
        compile_cache: where compiled programs are kept for the next start.
    """

    run_dir: Annotated[str | None, FREE] = None
    resume: Annotated[bool, FREE] = True
    seed: Annotated[int, SEED] = 0
    mesh: Annotated[str, FREE] = ""
    model: str = "demo"
    base: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    vision: Vision = "off"
    steps: Annotated[int, COUNT, FREE] = 200
    epochs: Annotated[float | None, POSITIVE, FREE] = None
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: Annotated[EvalConfig, FREE] = field(default_factory=EvalConfig)
    checkpoint: Annotated[CheckpointConfig, FREE] = field(
        default_factory=CheckpointConfig
    )
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    kernels: Annotated[Literal["auto", "xla", "pallas_tpu", "pallas_gpu"], FREE] = (
        "auto"
    )
    log: Annotated[tuple[TrackerName, ...], FREE] = ("tensorboard",)
    log_project: Annotated[str | None, FREE] = None
    push_to_hub: Annotated[str | None, FREE] = None
    push_public: Annotated[bool, FREE] = False
    profile: Annotated[str | None, FREE] = None
    watch: Annotated[WatchConfig, FREE] = field(default_factory=WatchConfig)
    callbacks: Annotated[tuple[str, ...], FREE] = ()
    processes: Annotated[ProcessesConfig, FREE] = field(default_factory=ProcessesConfig)
    retries: Annotated[RetriesConfig, FREE] = field(default_factory=RetriesConfig)
    compile_cache: Annotated[CompileCacheConfig, FREE] = field(
        default_factory=CompileCacheConfig
    )


def differences(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Lists the options that a resumed run changes and must not.

    `FREE` options may differ. The end of a learning-rate schedule stays the same unless
    it is given again (config/horizon.py). An option that the config.json of an earlier
    version lacks counts as its default; an option that no longer exists must have been
    off.

    Args:
        saved: the configuration of the run, as config.json holds it.
        config: of the resumed run.

    Returns:
        One line per option; empty if the run can be resumed.

    >>> saved = dataclasses.asdict(RunConfig(seed=3, steps=7))
    >>> differences(saved, RunConfig())
    ['seed: 3 then, 0 now']
    """
    now = flattened(dataclasses.asdict(config))
    before = flattened(dataclasses.asdict(type(config)())) | flattened(saved)
    free = [name for name, _, notes in fields_of(config) if FREE in notes]
    return [
        f"{name}: {before.get(name)!r} then, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if (name in now or before[name])
        and before.get(name) != now.get(name)
        and not any(name == each or name.startswith(f"{each}.") for each in free)
    ]


def flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested options to their whole names; tuples become lists, as in JSON.

    >>> flattened({"seed": 0, "update": {"epochs": 2}})
    {'seed': 0, 'update.epochs': 2}
    """
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= flattened(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(item) if isinstance(item, tuple) else item
    return flat


def address_of(text: str, option: str) -> tuple[str, int]:
    """Reads the host and the port of an address to listen on.

    Args:
        text: HOST:PORT; an IPv6 address in brackets.
        option: for the error.

    Raises:
        ConfigError: it is no HOST:PORT.

    >>> address_of("[::1]:0", "--fleet.listen")
    ('::1', 0)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{option}: must be HOST:PORT, such as 127.0.0.1:7777; got {text!r}"
        )
    return host.strip("[]"), int(port)


def profiled_steps(text: str | None, steps: int) -> range:
    """Returns the steps that `--profile` traces.

    Args:
        text: the option: a step, or the first and the last one with a colon.
        steps: of the run.

    Raises:
        ConfigError: it is neither, or the run has no such step.

    >>> profiled_steps("10:12", 20), profiled_steps("3", 20), profiled_steps(None, 20)
    (range(10, 13), range(3, 4), range(0, 0))
    """
    if text is None:
        return range(0)
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text, re.ASCII)
    first = last = 0
    if found is not None:
        first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise ConfigError(
            "--profile: must be a step from 1 on, such as 3, or the first and the last "
            f"one, such as 10:12; got {text!r}"
        )
    if last > steps:
        raise ConfigError(
            f"--profile: must be steps of the run, which are 1 to {steps} (--steps); "
            f"got {text!r}"
        )
    return range(first, last + 1)


def loaded_callbacks(names: Sequence[str]) -> list[Callable[[Any], object]]:
    """Imports callbacks and checks that each takes one argument.

    Args:
        names: each a `module:function`.

    Raises:
        ConfigError: there is no such function, its module raises, or it is a class,
            async, a generator, or takes another number of arguments.
    """
    found = []
    for name in names:
        try:
            function = imported(name, "callback")
            if inspect.isclass(function):
                raise ValueError(
                    f"callback {name!r} is a class; name a function, or an instance "
                    "that can be called"
                )
            check_takes(function, ("event",), f"callback {name!r}")
        except ValueError as error:
            raise ConfigError(f"--callbacks: {error}") from error
        found.append(function)
    return found
