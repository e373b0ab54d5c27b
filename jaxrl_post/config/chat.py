"""The options of a chat in the terminal."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import COUNT, NOT_NEGATIVE, SHARE, Range, check_numbers
from jaxrl_post.config.paths import check_paths
from jaxrl_post.mesh_spec import read_mesh

__all__ = ["ChatConfig", "check_chat"]


@dataclass(frozen=True)
class ChatConfig:
    """Which model to talk to, and how it answers.

    Attributes:
        model: a Hugging Face directory, a finished run, ORG/NAME on the hub, or a
            preset with random weights.
        revision: branch, tag or commit of a model on the hub.
        env: environment whose texts train the tokenizer of a preset.
        system: a system message before the first one.
        tools: what the model may call, as in training: python, shell,
            mcp?command=["..."], http?url=...&tools=FILE, or <module>:<name>.
        max_turns: most answers in a row that call tools, with the last one.
        max_result_tokens: most tokens of what a tool returned to the model; a longer
            result loses its middle, and says so.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from the k most probable tokens alone; 0 for all.
        top_p: sample from the smallest set of most probable tokens with this
            probability in total; 1 for all.
        min_p: sample from the tokens with at least this share of the top token's
            probability; 0 for all.
        max_tokens: most tokens of an answer; 0 for half of the model's context, at most
            1024.
        seed: of the sampling noise, and of a preset's weights.
        mesh: how many devices each axis of the mesh has, such as "tp8" (axes: dp, fsdp,
            ep, cp, tp); by default all devices are on dp.
        dtype: dtype of the parameters; None for the checkpoint's own.
    """

    model: str
    revision: str | None = None
    env: str = "arithmetic"
    system: str | None = None
    tools: tuple[str, ...] = ()
    max_turns: Annotated[int, COUNT] = 8
    max_result_tokens: Annotated[int, COUNT] = 1024
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    top_p: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    min_p: Annotated[float, SHARE] = 0.0
    max_tokens: Annotated[int, NOT_NEGATIVE] = 0
    seed: Annotated[int, NOT_NEGATIVE] = 0
    mesh: str = ""
    dtype: Literal["float32", "bfloat16"] | None = None


def check_chat(config: ChatConfig) -> None:
    """Refuses options that make no sense on any model and machine.

    Raises:
        ConfigError: names the option.
        MeshError: --mesh cannot be read.
    """
    check_numbers(config)
    read_mesh(config.mesh)
    check_paths(config)
