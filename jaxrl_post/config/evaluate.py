"""The options of an evaluation, of a test of rewards, and of looks into a run."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxrl_post.config.data import DataConfig, TemplateConfig, check_rows
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import (
    ANY,
    COUNT,
    DECAY,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    Range,
    check_numbers,
)
from jaxrl_post.config.paths import check_output, check_paths
from jaxrl_post.config.rollout import check_judges
from jaxrl_post.config.run import (
    CompileCacheConfig,
    ProcessesConfig,
    address_of,
)

__all__ = [
    "DoctorConfig",
    "EvaluateConfig",
    "LiveConfig",
    "RedteamConfig",
    "check_doctor",
    "check_live",
    "check_redteam",
    "result_files",
    "with_split",
]

# Default number of tasks of an environment that makes its tasks.
GENERATED_TASKS = 200


@dataclass(frozen=True)
class EvaluateConfig:
    """The model, tasks and sampling of an evaluation.

    Attributes:
        model: a Hugging Face directory, a run, an adapter of PEFT, ORG/NAME on the hub,
            or a preset with random weights: demo, tiny, small, or a published size such
            as qwen3-0.6b.
        step: step of the run whose checkpoint is read; None for the model of a finished
            run, and for the newest checkpoint of one that is not.
        base: where the config.json and the tokenizer of the model of such a run are, or
            the model under an adapter; None for the one that the run or adapter names.
        revision: branch, tag or commit of a model on the hub.
        suite: TOML, YAML or JSON file of several evaluations, each with an environment
            (docs/how-to/evaluation.md). Options that a part does not give are taken
            from here. None for one evaluation, of `env`.
        env: environment, as for training, such as arithmetic?level=2 or gsm8k; bfcl
            (docs/how-to/protocols.md) can only be evaluated.
        tools: tools that the model may call before it answers, as for training. Needs
            `max_turns`.
        data: files of tasks, for environments that read files.
        template: variables and date for the chat template; for a run's model, variables
            that are not given are taken from the run.
        split: which tasks; the tasks of "eval" are held out from training, a tenth of
            `data.path` if `data.eval_path` is not given. None: all tasks of a file that
            is given alone, else "eval".
        num_tasks: number of tasks, from the first; equal prompts count once. None: all
            tasks of a file, 200 of an environment that makes its tasks.
        samples: number of samples of each task.
        sampling_defaults: for the options among temperature, top_k, top_p, min_p,
            max_tokens and stop_strings that are not given. "greedy": 0, no cuts, 256;
            "model": the values of the checkpoint's generation_config.json, and for what
            it leaves out "greedy".
        temperature: sampling temperature, >= 0; 0 takes the most probable token
            (greedy).
        top_k: sample from the k most probable tokens alone; 0 for all.
        top_p: sample from the smallest set of most probable tokens with this
            probability in total, in (0, 1]; 1 for all.
        min_p: sample from the tokens with at least this share of the top token's
            probability, in [0, 1]; 0 for all.
        stop_strings: texts that end a completion; it ends with the token that completes
            one of them.
        max_tokens: most tokens of a completion, the stop token included.
        max_turns: most turns of the model in an episode.
        max_result_tokens: most tokens of a tool's result; a longer one loses its
            middle, and a note in it says so.
        max_prompt_tokens: most tokens of a conversation before its last turn; with one
            turn, 0 takes the length of the longest first prompt.
        solved_reward: a sample with at least this reward solves its task.
        seed: seed of the sampling noise.
        mesh: how many devices each axis of the mesh has, such as "dp4,tp8" (axes: dp,
            fsdp, ep, cp, tp); by default all devices are on dp.
        dtype: dtype of the parameters; None for the checkpoint's own.
        vision: whether the model gets the pictures of messages, by its vision tower.
        num_slots: number of samples that decode at once.
        judges: where answers are judged. local: in processes on this machine; ray: on
            the Ray cluster that is running, else on one started on this machine;
            ray:HOST:PORT: on the nodes of that cluster; ray:local: always on one
            started on this machine.
        reward_workers: number of processes that judge answers.
        reward_cpus: with judges on a Ray cluster, CPUs reserved for each process.
        reward_deadline_s: most seconds for one judgement.
        reward_memory_gib: most GiB of address space of a judging process; a judgement
            that needs more fails. None for no limit.
        deadline_s: most seconds for the whole evaluation; of a suite, for each part.
        processes: the processes of the evaluation, if there are several. Each executes
            the same command; process 0 writes.
        compile_cache: where compiled programs are kept for the next start.
        output: JSON file for the results; a page and the completions are written to
            files in the same folder whose names end in .html and .completions.jsonl.
            None writes nothing.
        against: results of an earlier evaluation, a file of `output`. The same tasks
            are compared; the exit status is 1 if the accuracy of a part fell.
        against_margin: drop of accuracy that is allowed, in [0, 1]: the accuracy fell
            if the whole 95 % interval of the difference lies below it.
    """

    model: str
    step: Annotated[int | None, ANY] = None
    base: str | None = None
    revision: str | None = None
    suite: str | None = None
    env: str = "arithmetic"
    tools: tuple[str, ...] = ()
    data: DataConfig = field(default_factory=DataConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    split: Literal["eval", "train"] | None = None
    num_tasks: Annotated[int | None, COUNT] = None
    samples: Annotated[int, COUNT] = 1
    sampling_defaults: Literal["greedy", "model"] = "greedy"
    temperature: Annotated[float | None, NOT_NEGATIVE] = None
    top_k: Annotated[int | None, NOT_NEGATIVE] = None
    top_p: Annotated[float | None, Range(0, 1, open_low=True)] = None
    min_p: Annotated[float | None, SHARE] = None
    stop_strings: tuple[str, ...] = ()
    max_tokens: Annotated[int | None, COUNT] = None
    max_turns: Annotated[int, COUNT] = 1
    max_result_tokens: Annotated[int, COUNT] = 1024
    max_prompt_tokens: Annotated[int, NOT_NEGATIVE] = 0
    solved_reward: Annotated[float, ANY] = 1.0
    seed: Annotated[int, SEED] = 0
    mesh: str = ""
    dtype: Literal["float32", "bfloat16"] | None = None
    vision: bool = False
    num_slots: Annotated[int, COUNT] = 64
    judges: str = "local"
    reward_workers: Annotated[int, COUNT] = 1
    reward_cpus: Annotated[float, POSITIVE] = 1.0
    reward_deadline_s: Annotated[float, POSITIVE] = 10.0
    reward_memory_gib: Annotated[float | None, POSITIVE] = None
    deadline_s: Annotated[float, POSITIVE] = 24 * 3600.0
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)
    compile_cache: CompileCacheConfig = field(default_factory=CompileCacheConfig)
    output: str | None = None
    against: str | None = None
    against_margin: Annotated[float, SHARE] = 0.0


def with_split(config: EvaluateConfig) -> EvaluateConfig:
    """Fills in `split` and `num_tasks`, and the paths of a file that is given alone.

    >>> config = EvaluateConfig("demo", data=DataConfig(eval_path="test.jsonl"))
    >>> config = with_split(config)
    >>> config.split, config.num_tasks, config.data.path == config.data.eval_path
    ('eval', None, True)
    >>> with_split(EvaluateConfig("demo")).num_tasks
    200
    """
    data = config.data
    files = {path for path in (data.path, data.eval_path) if path is not None}
    if config.split is None and len(files) == 1:
        (file,) = files
        data = dataclasses.replace(data, path=file, eval_path=file)
    count = config.num_tasks
    if count is None and not files:
        count = GENERATED_TASKS
    return dataclasses.replace(
        config, data=data, split=config.split or "eval", num_tasks=count
    )


def result_files(config: EvaluateConfig) -> tuple[Path, ...]:
    """The files for results, page and completions; none without `output`.

    >>> names = result_files(EvaluateConfig("demo", output="results.json"))
    >>> [str(name) for name in names]
    ['results.json', 'results.html', 'results.completions.jsonl']
    """
    if config.output is None:
        return ()
    results = Path(config.output)
    return results, *map(results.with_suffix, (".html", ".completions.jsonl"))


@dataclass(frozen=True)
class RedteamConfig:
    """The environment whose reward is tested, and how.

    Attributes:
        env: environment, as for training, such as arithmetic?level=2 or gsm8k.
        data: files of tasks, for environments that read files.
        split: which tasks.
        num_tasks: number of tasks, from the first.
        max_turns: most turns of an episode; each turn gives the same answer.
        max_tokens: the number of tokens that each answer is said to have.
        solved_reward: reward of an answer that solves its task, where no right answer
            is known.
        tolerance: share of its tasks that an attack may solve by luck, in [0, 1).
        kinds: the kinds of attacks to try; all if none is given.
        judges: where answers are judged, as for training.
        reward_workers: number of processes that judge answers.
        reward_cpus: with judges on a Ray cluster, CPUs reserved for each process.
        reward_deadline_s: most seconds for one judgement.
        reward_memory_gib: most GiB of address space of a judging process; None for no
            limit.
        output: JSON file for the results; None writes nothing.
    """

    env: str
    data: DataConfig = field(default_factory=DataConfig)
    split: Literal["eval", "train"] = "eval"
    num_tasks: Annotated[int, COUNT] = 20
    max_turns: Annotated[int, COUNT] = 8
    max_tokens: Annotated[int, COUNT] = 256
    solved_reward: Annotated[float, ANY] = 1.0
    tolerance: Annotated[float, DECAY] = 0.0
    kinds: tuple[str, ...] = ()
    judges: str = "local"
    reward_workers: Annotated[int, COUNT] = 2
    reward_cpus: Annotated[float, POSITIVE] = 1.0
    reward_deadline_s: Annotated[float, POSITIVE] = 10.0
    reward_memory_gib: Annotated[float | None, POSITIVE] = None
    output: str | None = None


@dataclass(frozen=True)
class LiveConfig:
    """The run that a page follows.

    Attributes:
        run_dir: directory of a run that ended, that runs, or that begins just now.
        listen: HOST:PORT of the page; None for 127.0.0.1:8070, or for a free port if
            that is taken. The page has no password: who reaches the address reads the
            run.
        open: whether to open the page in a browser.
    """

    run_dir: str
    listen: str | None = None
    open: bool = False

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of `listen`; None if it was not given.

        Raises:
            ConfigError: it is no HOST:PORT.
        """
        return None if self.listen is None else address_of(self.listen, "--listen")


def check_live(config: LiveConfig) -> None:
    """Refuses an address that cannot be read.

    Raises:
        ConfigError: names the option.
    """
    if config.listen is not None:
        address_of(config.listen, "--listen")


@dataclass(frozen=True)
class DoctorConfig:
    """The run to look at, or the faults to plant.

    Attributes:
        run_dir: directory of a run that ended, or that runs.
        replay: step that is taken again, in a copy, from the checkpoint before it; its
            metrics must be the same. None for no replay.
        inject: faults that are planted in short runs, in place of a run to look at;
            "all" for all of them. The doctor must name each.
        timeout_s: most seconds for a replay.
    """

    run_dir: str = ""
    replay: Annotated[int | None, COUNT] = None
    inject: tuple[str, ...] = ()
    timeout_s: Annotated[float, POSITIVE] = 3600.0


def check_doctor(config: DoctorConfig) -> None:
    """Refuses options that contradict each other.

    Raises:
        ConfigError: names the option.
    """
    check_numbers(config)
    if bool(config.run_dir) == bool(config.inject):
        raise ConfigError(
            "give the directory of a run, as in python -m launch.doctor runs/demo, or "
            "faults to plant, as in --inject all"
        )
    if config.replay is not None and config.inject:
        raise ConfigError("--replay: takes a step of a run again; drop --inject")


def check_redteam(config: RedteamConfig) -> None:
    """Refuses options that make no sense for any environment.

    Raises:
        ConfigError: names the option.
    """
    check_numbers(config)
    check_rows(config.data, own=True)
    check_judges(config.judges, config.reward_cpus, "")
    check_paths(config)
    if config.output is not None:
        check_output(Path(config.output), "--output")
