"""The options of the programs that serve a model: the server and the chat."""

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxrl_post.config.data import TemplateConfig, check_template
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import (
    ANY,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    Range,
    check_numbers,
)
from jaxrl_post.config.paths import check_paths
from jaxrl_post.config.run import CompileCacheConfig, ProcessesConfig
from jaxrl_post.mesh_spec import read_mesh

__all__ = [
    "ChatConfig",
    "ServeConfig",
    "check_chat",
    "check_server",
    "is_loopback",
    "read_key",
]

# Options that a sampler of a training run reads.
FOLLOWING = {
    "api_key_file", "compile_cache", "follow", "follow_wait_s", "host", "mesh", "name",
    "port", "processes",
}  # fmt: skip


@dataclass(frozen=True)
class ServeConfig:
    """The model, address and limits of a server, or of a sampler of a training run.

    Attributes:
        model: a Hugging Face directory, a run, an adapter of PEFT, ORG/NAME on the hub,
            or a preset with random weights: demo, tiny, small, or a published size such
            as qwen3-0.6b.
        follow: address of a trainer that was started with --samplers any:N, or the
            directory of its run, which need not be there yet. This process then samples
            for that run, with the trainer's model and options of sampling; of the
            options here `mesh`, `name`, `host`, `port`, `processes`, `compile_cache`
            and `api_key_file` (the trainer's --fleet.key-file) apply.
        follow_wait_s: seconds for which such a trainer may be away, such as while it
            resumes from a checkpoint.
        step: step of the run whose checkpoint is read; None for the model of a finished
            run, and for the newest checkpoint of one that is not.
        base: where the config.json and the tokenizer of the model of such a run are, or
            the model under an adapter; None for the one that the run or adapter names.
        revision: branch, tag or commit of a model on the hub.
        env: environment whose texts train the tokenizer of a preset.
        template: variables and date for the chat template, unless a request gives
            others (chat_template_kwargs). For a run's model, variables that are not
            given are taken from the run.
        name: name of the model in requests; None for the directory's name, or `model`
            as it is.
        host: address to listen on; an address outside this machine's loopback needs
            `api_key_file`.
        port: port to listen on; 0 for a free one.
        api_key_file: file with the key that clients must send; None asks for none.
        sampling_defaults: values of sampling parameters that a request leaves out.
            "neutral": temperature 1, no cuts; "model": the values of the checkpoint's
            generation_config.json.
        max_model_len: most tokens of a prompt and its completion together; 0 for the
            model's context, or for what the cache holds if that is less.
        max_tokens: most tokens of a completion if its request gives no limit; 0 for
            half of `max_model_len`, at most 1024. A sample starts when the cache has
            room for its longest completion, so a larger value lets fewer samples run at
            once.
        cache_tokens: tokens, over all devices, whose keys and values the sampler holds;
            0 for 2048 for each slot, or for the model's context if that is less.
        num_slots: number of samples that decode at once.
        max_samples: most samples that wait or run; further requests are answered with
            429.
        max_episodes: most episodes of agents that are kept, open or ended; a further
            one replaces the oldest that has ended.
        episode_deadline_s: seconds after which an episode ends by itself.
        max_responses: most responses (/v1/responses) that are kept for requests that
            continue them; the least recently used ones give way.
        max_responses_mib: most MiB of these responses and their inputs.
        max_body_mib: most MiB of a request's body.
        timeout_s: most seconds for an answer, its time in the queue included.
        grace_s: after SIGTERM or Ctrl-C, most seconds to finish running answers.
        seed: seed of a preset's weights, and of the noise of requests that give a seed.
        mesh: how many devices each axis of the mesh has, such as "dp4,tp8" (axes: dp,
            fsdp, ep, cp, tp); by default all devices are on dp.
        dtype: dtype of the parameters; None for the checkpoint's own.
        vision: whether the model gets the pictures of messages, by its vision tower.
        processes: the processes of a sampler on several hosts, with `follow`.
        compile_cache: where compiled programs are kept for the next start.
    """

    model: str = ""
    follow: str | None = None
    follow_wait_s: Annotated[float, POSITIVE] = 600.0
    step: Annotated[int | None, ANY] = None
    base: str | None = None
    revision: str | None = None
    env: str = "arithmetic"
    template: TemplateConfig = field(default_factory=TemplateConfig)
    name: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    api_key_file: str | None = None
    sampling_defaults: Literal["neutral", "model"] = "neutral"
    max_model_len: Annotated[int, NOT_NEGATIVE] = 0
    max_tokens: Annotated[int, NOT_NEGATIVE] = 0
    cache_tokens: Annotated[int, NOT_NEGATIVE] = 0
    num_slots: Annotated[int, COUNT] = 64
    max_samples: Annotated[int, COUNT] = 4096
    max_episodes: Annotated[int, COUNT] = 4096
    episode_deadline_s: Annotated[float, POSITIVE] = 3600.0
    max_responses: Annotated[int, COUNT] = 16384
    max_responses_mib: Annotated[float, POSITIVE] = 256.0
    max_body_mib: Annotated[float, POSITIVE] = 4.0
    timeout_s: Annotated[float, POSITIVE] = 600.0
    grace_s: Annotated[float, NOT_NEGATIVE] = 30.0
    seed: Annotated[int, SEED] = 0
    mesh: str = ""
    dtype: Literal["float32", "bfloat16"] | None = None
    vision: bool = False
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)
    compile_cache: CompileCacheConfig = field(default_factory=CompileCacheConfig)


def check_server(config: ServeConfig) -> None:
    """Refuses options that make no sense on any model and machine.

    Raises:
        ConfigError: names the option.
        MeshError: --mesh cannot be read.
    """
    check_numbers(config)
    check_template(config.template)
    read_mesh(config.mesh, trains=False)
    check_paths(config)
    _check_follow(config)
    if config.max_model_len == 1:
        raise ConfigError(
            "--max-model-len: must be at least 2, for a token of a prompt and one of "
            "its completion, or 0 for the model's context; got 1"
        )
    key = config.api_key_file
    if key is not None and not Path(key).is_file():
        raise ConfigError(f"--api-key-file: there is no file {key}")
    if key is None and not is_loopback(config.host):
        raise ConfigError(
            f"--host: {config.host} can be reached from other machines, where any "
            "client could use the model; give --api-key-file, or listen on 127.0.0.1"
        )


def _check_follow(config: ServeConfig) -> None:
    """Refuses options that a sampler of a training run does not read."""
    follow = config.follow
    if follow is None:
        if config.processes != ProcessesConfig():
            raise ConfigError(
                "--processes.*: a server is one process; only with --follow a sampler "
                "may have several; drop the options"
            )
        if not config.model:
            raise ConfigError(
                "--model: is missing; give a model, or --follow a trainer"
            )
        return
    url, host = r"https?://[^/\s]+/?", r"[^/\s]+:\d+"
    if not re.fullmatch(url, follow) and re.search(rf"://|^{host}$", follow):
        raise ConfigError(
            "--follow: must be the trainer's address, such as http://127.0.0.1:7777, "
            f"or the directory of its run, such as runs/apart; got {follow!r}"
        )
    if config.name is not None and not re.fullmatch(r"[\w.-]{1,80}", config.name):
        raise ConfigError(
            "--name: of a sampler must be letters, digits, dots, hyphens and "
            f"underscores, at most 80; got {config.name!r}"
        )
    default = ServeConfig()
    for name, value in vars(config).items():
        if name not in FOLLOWING and value != getattr(default, name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: with --follow the trainer says what is "
                "sampled and how; drop the option"
            )


def read_key(config: ServeConfig) -> str | None:
    """Returns the key that clients must send; None to ask for none.

    Raises:
        ConfigError: the file is empty.
    """
    if config.api_key_file is None:
        return None
    key = Path(config.api_key_file).read_text(encoding="utf-8").strip()
    if not key:
        raise ConfigError(f"--api-key-file: {config.api_key_file} is empty")
    return key


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class ChatConfig:
    """The model to talk to, its tools and its sampling.

    Attributes:
        model: a Hugging Face directory, a run, an adapter of PEFT, ORG/NAME on the hub,
            or a preset with random weights.
        step: step of the run whose checkpoint is read; None for the model of a finished
            run, and for the newest checkpoint of one that is not.
        base: where the config.json and the tokenizer of the model of such a run are, or
            the model under an adapter; None for the one that the run or adapter names.
        revision: branch, tag or commit of a model on the hub.
        env: environment whose texts train the tokenizer of a preset.
        template: variables and date for the chat template; for a run's model, variables
            that are not given are taken from the run.
        system: a system message before the first one.
        tools: what the model may call, as in training: python, shell,
            search?corpus=FILE, mcp?command=["..."], http?url=...&tools=FILE, or
            <module>:<name>.
        max_turns: most answers in a row that call tools, with the last one.
        max_result_tokens: most tokens of a tool's result; a longer one loses its
            middle, and a note in it says so.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from the k most probable tokens alone; 0 for all.
        top_p: sample from the smallest set of most probable tokens with this
            probability in total; 1 for all.
        min_p: sample from the tokens with at least this share of the top token's
            probability; 0 for all.
        max_tokens: most tokens of an answer; 0 for half of the model's context, at most
            1024.
        seed: seed of the sampling noise, and of a preset's weights.
        mesh: how many devices each axis of the mesh has, such as "tp8" (axes: dp, fsdp,
            ep, cp, tp); by default all devices are on dp.
        dtype: dtype of the parameters; None for the checkpoint's own.
        vision: whether the model gets the pictures of messages, by its vision tower.
        compile_cache: where compiled programs are kept for the next start.
    """

    model: str
    step: Annotated[int | None, ANY] = None
    base: str | None = None
    revision: str | None = None
    env: str = "arithmetic"
    template: TemplateConfig = field(default_factory=TemplateConfig)
    system: str | None = None
    tools: tuple[str, ...] = ()
    max_turns: Annotated[int, COUNT] = 8
    max_result_tokens: Annotated[int, COUNT] = 1024
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    top_p: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    min_p: Annotated[float, SHARE] = 0.0
    max_tokens: Annotated[int, NOT_NEGATIVE] = 0
    seed: Annotated[int, SEED] = 0
    mesh: str = ""
    dtype: Literal["float32", "bfloat16"] | None = None
    vision: bool = False
    compile_cache: CompileCacheConfig = field(default_factory=CompileCacheConfig)


def check_chat(config: ChatConfig) -> None:
    """Refuses options that make no sense on any model and machine.

    Raises:
        ConfigError: names the option.
        MeshError: --mesh cannot be read.
    """
    check_numbers(config)
    check_template(config.template)
    read_mesh(config.mesh, trains=False)
    check_paths(config)
