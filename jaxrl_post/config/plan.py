"""The options of `launch.plan`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from jaxrl_post.config.fields import (
    ANY,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
)
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import (
    MomentDtype,
    OptimizerConfig,
    OptimizerName,
    check_optimizer,
)
from jaxrl_post.config.rollout import CacheDtype, WeightsDtype, expected_samplers

__all__ = [
    "PlanConfig",
    "PlanError",
    "PlannedNetwork",
    "PlannedOptimizer",
    "PlannedRates",
    "PlannedRollout",
]


# A share that is more than nothing.
PART = Range(0, 1, open_low=True)


class PlanError(ValueError):
    """A plan that cannot be made."""


@dataclass(frozen=True)
class PlannedOptimizer:
    """The optimizer of the planned step; named as a run's --optimizer.* options.

    Attributes:
        name: adamw, muon, adafactor, lion or sgd (with momentum). The seconds of an
            optimizer step are predicted for all but muon.
        moment_dtype: dtype of the mean of the gradients.
    """

    name: OptimizerName = "adamw"
    moment_dtype: MomentDtype = "float32"

    def of_a_run(self) -> OptimizerConfig:
        """The options of a run with this optimizer.

        Raises:
            ConfigError: the optimizer has no mean of gradients, but its dtype is given.
        """
        config = OptimizerConfig(name=self.name, moment_dtype=self.moment_dtype)
        check_optimizer(config, "optimizer")
        return config


@dataclass(frozen=True)
class PlannedRollout:
    """The samples of the planned step; named as a run's --rollout.* options.

    Attributes:
        prompts_per_step: prompts of a step; 0 plans only the train step, with one
            microbatch and a sampler on other devices.
        samples_per_prompt: samples of a prompt, which form its group.
        max_prompt_tokens: tokens of every prompt.
        max_tokens: tokens of every completion, or of the longest with --mean-tokens.
        mesh: mesh of the sampler, on the devices of --mesh; "" for the same mesh, on
            which the sampler uses the trainer's own arrays. With --samplers, the mesh
            of each sampler on its own devices, one without it.
        ahead: with --samplers, steps by which sampling is ahead of training, as in a
            run.
        dtype: dtype of the sampler's parameters; None for --dtype.
        publish_mib: with another mesh or dtype, most MiB of parameters that are moved
            at a time.
        cache_dtype: how the sampler holds keys and values, as in a run.
        weights: how the sampler holds its matrices, as in a run. The plan leaves out
            the time to quantise them once per step.
        num_slots: number of samples that decode at once; 0 for all of a step.
        steps_per_call: tokens that each sample decodes in a burst, before the host
            looks at the results; 0 chooses.
    """

    prompts_per_step: Annotated[int, NOT_NEGATIVE] = 0
    samples_per_prompt: Annotated[int, COUNT] = 8
    max_prompt_tokens: Annotated[int, COUNT] = 512
    max_tokens: Annotated[int, COUNT] = 1536
    mesh: str = ""
    ahead: Annotated[int, NOT_NEGATIVE] = 0
    dtype: Literal["float32", "bfloat16"] | None = None
    publish_mib: Annotated[int, COUNT] = 1024
    cache_dtype: CacheDtype | None = None
    weights: WeightsDtype | None = None
    num_slots: Annotated[int, NOT_NEGATIVE] = 0
    steps_per_call: Annotated[int, NOT_NEGATIVE] = 0


@dataclass(frozen=True)
class PlannedNetwork:
    """The network over which samplers in other processes get the parameters.

    Attributes:
        bytes_per_s: bytes per second that a host sends and receives.
        changed: share of the parameters whose bits a step changes.
    """

    bytes_per_s: Annotated[float, POSITIVE] = 12.5e9
    changed: Annotated[float, SHARE] = 0.02


@dataclass(frozen=True)
class PlannedRates:
    """Shares of a device's peak rates that programs reach; 1 is the roofline.

    Attributes:
        compute: of its FLOP/s.
        memory: of its memory's bandwidth.
        links: of the bandwidth of links and network.
    """

    compute: Annotated[float, PART] = 1.0
    memory: Annotated[float, PART] = 1.0
    links: Annotated[float, PART] = 1.0


@dataclass(frozen=True)
class PlanConfig:
    """Model, topology and layout of a planned training step.

    Attributes:
        model: a preset, such as llama-3.1-8b (`jaxrl_post.pretrained.presets`), a
            directory with a config.json, or ORG/NAME on the hub.
        revision: branch, tag or commit of a --model on the hub.
        topology: generation and shape of the TPU slice, such as v5e:4x4 or v5p:4x4x4;
            or the kind of GPU (h100, h200, b200), nodes and GPUs of each, such as
            h100:8x8.
        mesh: how many devices each axis of the mesh has, such as fsdp8,tp2; -1 for all
            that are left.
        rows: packed rows of a microbatch; 0 for one on each part into which the mesh
            splits a batch.
        row_tokens: length of a packed row in tokens.
        remat: what the forward pass of a layer keeps for the backward pass, as
            --update.remat of a run.
        scan_layers: compile layers that repeat once, as --update.scan-layers of a run.
        precision: of the matrix products in training, as --update.precision of a run.
        stage_rounds: with pp in `mesh`, chunks of layers of a pipeline stage, as
            --update.stage-rounds of a run; None for as many as the layers allow. More
            `rows` are --update.stage-groups.
        dtype: dtype of the parameters; below float32 the optimizer has float32 masters
            of those that it trains.
        lora: adapter that is trained in place of the model, in float32.
        optimizer: whose state takes memory.
        rollout: samples of a step, and the sampler's layout.
        mean_tokens: mean tokens of a completion; 0 for `rollout.max_tokens`. The share
            of completions with more than t tokens is then taken to be
            (1 - t / max) ** (max / mean - 1).
        step_overhead_s: seconds of each decoding step that a count leaves out, such as
            launches and waits between devices.
        rates: shares of the peak rates with which seconds are predicted.
        days: length of a run, for which steps, samples and tokens are told; 0 for none.
        samplers: samplers with devices of their own, as of a run: a number N of the
            topology's devices, or any:N for other processes, whose devices are part of
            the topology here. The trainer has the other devices. 0: sampling and
            training take turns.
        network: with --samplers any:N, how parameters reach the samplers.
        compile: compile the programs, which tells their memory and collectives. Without
            it both are counted from shapes, in seconds and without a compiler.
        compile_largest: of prefills, and of decoding bursts, compile the one with the
            largest view of the cache; the others need less memory, and are counted.
        memory_fraction: share of a GPU's memory for arrays and programs, as a run's
            XLA_PYTHON_CLIENT_MEM_FRACTION. The rest is for CUDA, NCCL and cuBLAS. Of a
            TPU it is known what the runtime keeps.
        compiler_options: options of XLA, as NAME=VALUE. A run takes the same through
            LIBTPU_INIT_ARGS="--NAME=VALUE", or XLA_FLAGS for GPUs.
        json: file to which the plan is written.
        hlo: directory to which the text of the compiled programs is written.
    """

    model: str
    topology: str
    revision: str | None = None
    mesh: str = "fsdp-1"
    rows: Annotated[int, ANY] = 0
    row_tokens: Annotated[int, ANY] = 4096
    remat: Literal["none", "dots", "full"] = "full"
    scan_layers: bool = False
    precision: Literal["float8"] | None = None
    stage_rounds: Annotated[int | None, COUNT] = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    optimizer: PlannedOptimizer = field(default_factory=PlannedOptimizer)
    rollout: PlannedRollout = field(default_factory=PlannedRollout)
    mean_tokens: Annotated[int, NOT_NEGATIVE] = 0
    step_overhead_s: Annotated[float, NOT_NEGATIVE] = 0.0
    rates: PlannedRates = field(default_factory=PlannedRates)
    days: Annotated[float, NOT_NEGATIVE] = 0.0
    samplers: Annotated[int | str, ANY] = 0
    network: PlannedNetwork = field(default_factory=PlannedNetwork)
    compile: bool = True
    compile_largest: bool = False
    memory_fraction: Annotated[float, PART] = 0.9
    compiler_options: tuple[str, ...] = ()
    json: Path | None = None
    hlo: Path | None = None

    @property
    def num_samplers(self) -> int:
        """Number of samplers with devices of their own.

        Raises:
            ConfigError: `samplers` cannot be read.
        """
        remote = expected_samplers(self.samplers)
        return self.samplers if isinstance(self.samplers, int) else remote

    @property
    def remote(self) -> bool:
        """Whether the samplers are in other processes."""
        return expected_samplers(self.samplers) > 0

    def with_samplers(self, count: int) -> "PlanConfig":
        """The same plan with another number of samplers of the same kind.

        >>> PlanConfig("m", "v5e:2x2", samplers="any:1").with_samplers(3).samplers
        'any:3'
        """
        return replace(self, samplers=f"any:{count}" if self.remote else count)
