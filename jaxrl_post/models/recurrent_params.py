"""The parameters of layers with a state: their trees, shapes and initialisers."""

from flax import struct

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.recurrences import GatedDelta, Mamba2, ShortConvolution
from jaxrl_post.models.spec import ParamSpec, matrix, ones, when, zeros

__all__ = [
    "GatedDeltaParams",
    "Mamba2Params",
    "ShortConvolutionParams",
    "convolution_specs",
    "delta_specs",
    "mamba_specs",
]


@struct.dataclass
class ShortConvolutionParams[Leaf]:
    """A gated short convolution.

    Attributes:
        input_gate: [hidden, channels], to B.
        output_gate: [hidden, channels], to C.
        inputs: [hidden, channels], to x.
        kernel: [kernel, channels], the weights of the sums, the oldest token's first.
        outputs: [channels, hidden].
        input_gate_bias: [channels].
        output_gate_bias: [channels].
        inputs_bias: [channels].
        kernel_bias: [channels].
        outputs_bias: [hidden].
    """

    input_gate: Leaf
    output_gate: Leaf
    inputs: Leaf
    kernel: Leaf
    outputs: Leaf
    input_gate_bias: Leaf | None = None
    output_gate_bias: Leaf | None = None
    inputs_bias: Leaf | None = None
    kernel_bias: Leaf | None = None
    outputs_bias: Leaf | None = None


@struct.dataclass
class GatedDeltaParams[Leaf]:
    """A gated delta net.

    Attributes:
        query: [hidden, key_heads, key_dim].
        key: [hidden, key_heads, key_dim].
        value: [hidden, heads, value_dim].
        output_gate: [hidden, heads, value_dim].
        beta: [hidden, heads], to the part of a value that is replaced.
        decay: [hidden, heads], to the step of the decay.
        query_kernel: [kernel, key_heads, key_dim], the oldest token's weights first.
        key_kernel: as the queries'.
        value_kernel: [kernel, heads, value_dim].
        rate: [heads], logarithm of the rate of decay.
        step_bias: [heads].
        norm: [value_dim], which the norm multiplies by.
        output: [heads, value_dim, hidden].
    """

    query: Leaf
    key: Leaf
    value: Leaf
    output_gate: Leaf
    beta: Leaf
    decay: Leaf
    query_kernel: Leaf
    key_kernel: Leaf
    value_kernel: Leaf
    rate: Leaf
    step_bias: Leaf
    norm: Leaf
    output: Leaf


@struct.dataclass
class Mamba2Params[Leaf]:
    """A layer of Mamba-2.

    Attributes:
        query: [hidden, key_heads, key_dim].
        key: [hidden, key_heads, key_dim].
        value: [hidden, heads, value_dim].
        output_gate: [hidden, heads, value_dim].
        step: [hidden, heads].
        query_kernel: [kernel, key_heads, key_dim], the oldest token's weights first.
        key_kernel: as the queries'.
        value_kernel: [kernel, heads, value_dim].
        rate: [heads], logarithm of the rate of decay.
        step_bias: [heads].
        skip: [heads], factor of the values in the output.
        norm: [heads, value_dim].
        output: [heads, value_dim, hidden].
        query_kernel_bias: [key_heads, key_dim].
        key_kernel_bias: [key_heads, key_dim].
        value_kernel_bias: [heads, value_dim].
    """

    query: Leaf
    key: Leaf
    value: Leaf
    output_gate: Leaf
    step: Leaf
    query_kernel: Leaf
    key_kernel: Leaf
    value_kernel: Leaf
    rate: Leaf
    step_bias: Leaf
    skip: Leaf
    norm: Leaf
    output: Leaf
    query_kernel_bias: Leaf | None = None
    key_kernel_bias: Leaf | None = None
    value_kernel_bias: Leaf | None = None


def convolution_specs(
    config: ModelConfig, convolution: ShortConvolution
) -> ShortConvolutionParams[ParamSpec]:
    """Returns the specs of a short convolution."""
    # There are as many channels as hidden dims, but a mesh splits them as it splits an
    # MLP's.
    hidden, into = config.hidden_size, ("embed", "channels")
    bias = when(convolution.bias, zeros((hidden,), ("channels",)))
    return ShortConvolutionParams(
        input_gate=matrix((hidden, hidden), into),
        output_gate=matrix((hidden, hidden), into),
        inputs=matrix((hidden, hidden), into),
        kernel=matrix((convolution.kernel, hidden), ("kernel", "channels")),
        outputs=matrix((hidden, hidden), ("channels", "embed")),
        input_gate_bias=bias,
        output_gate_bias=bias,
        inputs_bias=bias,
        kernel_bias=bias,
        outputs_bias=when(convolution.bias, zeros((hidden,), ("norm",))),
    )


def delta_specs(config: ModelConfig, delta: GatedDelta) -> GatedDeltaParams[ParamSpec]:
    """Returns the specs of a gated delta net."""
    hidden, head_axes = config.hidden_size, ("heads", "head_dim")
    by_key = delta.key_heads, delta.key_dim
    by_value = delta.value_heads, delta.value_dim
    into, of_kernel = ("embed", *head_axes), ("kernel", *head_axes)
    each = (delta.value_heads,)
    return GatedDeltaParams(
        query=matrix((hidden, *by_key), into),
        key=matrix((hidden, *by_key), into),
        value=matrix((hidden, *by_value), into),
        output_gate=matrix((hidden, *by_value), into),
        beta=matrix((hidden, *each), ("embed", "heads")),
        decay=matrix((hidden, *each), ("embed", "heads")),
        query_kernel=matrix((delta.kernel, *by_key), of_kernel),
        key_kernel=matrix((delta.kernel, *by_key), of_kernel),
        value_kernel=matrix((delta.kernel, *by_value), of_kernel),
        rate=ParamSpec(each, ("heads",), init="decay_rate", wide=True),
        step_bias=ParamSpec(each, ("heads",), init="decay_step", wide=True),
        norm=ones((delta.value_dim,), ("head_dim",)),
        output=matrix((*by_value, hidden), (*head_axes, "embed")),
    )


def mamba_specs(config: ModelConfig, kind: Mamba2) -> Mamba2Params[ParamSpec]:
    """Returns the specs of a layer of Mamba-2."""
    hidden, head_axes = config.hidden_size, ("heads", "head_dim")
    by_key = kind.key_heads, kind.key_dim
    by_value = kind.value_heads, kind.value_dim
    into, of_kernel = ("embed", *head_axes), ("kernel", *head_axes)
    each, bias = (kind.value_heads,), kind.kernel_bias
    return Mamba2Params(
        query=matrix((hidden, *by_key), into),
        key=matrix((hidden, *by_key), into),
        value=matrix((hidden, *by_value), into),
        output_gate=matrix((hidden, *by_value), into),
        step=matrix((hidden, *each), ("embed", "heads")),
        query_kernel=matrix((kind.kernel, *by_key), of_kernel),
        key_kernel=matrix((kind.kernel, *by_key), of_kernel),
        value_kernel=matrix((kind.kernel, *by_value), of_kernel),
        rate=ParamSpec(each, ("heads",), init="decay_rate", wide=True),
        step_bias=ParamSpec(each, ("heads",), init="decay_step", wide=True),
        skip=ones(each, ("heads",), wide=True),
        norm=ones(by_value, head_axes),
        output=matrix((*by_value, hidden), (*head_axes, "embed")),
        query_kernel_bias=when(bias, zeros(by_key, head_axes)),
        key_kernel_bias=when(bias, zeros(by_key, head_axes)),
        value_kernel_bias=when(bias, zeros(by_value, head_axes)),
    )
