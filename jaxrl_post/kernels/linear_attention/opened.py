"""Linear attention of a few tokens, where perhaps only the first ones count.

A sampler that guesses learns from the outputs of the tokens which of them count. Until
then the state S before them is kept, with what each token writes: with G the sum of log
decays since S,

    u_i = beta_i (v_i - e^(G_i) S^T k_i - sum_{j<i} e^(G_i - G_j) (k_i.k_j) u_j)
    o_i = e^(G_i) S^T q_i + sum_{j<=i} e^(G_i - G_j) (q_i.k_j) u_j

and the state after the n-th is  e^(G_n) S + sum_{j<=n} e^(G_n - G_j) k_j u_j^T.
Without the delta rule, u is v. So a pass reads a state twice and writes it once,
however many tokens it has, and holds no state of any token.
"""

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.types import Array, Float, Int

__all__ = ["OpenMemory", "linear_open"]


@struct.dataclass
class OpenMemory:
    """The states of rows before some tokens, and what the tokens may change; float32.

    Attributes:
        before: S of each row.
        key: k of each token.
        written: u of each token.
        decay: of each token, in nats.
    """

    before: Float[Array, "batch heads key_dim value_dim"]
    key: Float[Array, "batch length heads key_dim"]
    written: Float[Array, "batch length heads value_dim"]
    decay: Float[Array, "batch length heads"]

    def after(
        self, counts: Int[Array, " batch"]
    ) -> Float[Array, "batch heads key_dim value_dim"]:
        """The states after the first tokens of each row.

        Args:
            counts: int32, number of tokens; with 0 a row's state stays as it is, to the
                last bit.
        """
        length = self.key.shape[1]
        counted = jnp.arange(length, dtype=jnp.int32) < counts[:, None]

        def masked(each: Array) -> Array:
            # A row that has ended may hold values that are not finite.
            return jnp.where(counted.reshape(*counted.shape, 1, 1), each, 0)

        decay = jnp.where(counted[..., None], self.decay, 0)
        # The decays of the tokens after each one, without a difference of sums.
        later = jnp.pad(decay[:, 1:], ((0, 0), (0, 1), (0, 0)))
        later = jnp.cumsum(later[:, ::-1], axis=1)[:, ::-1]
        key = masked(jnp.exp(later)[..., None] * self.key)
        added = jnp.einsum(
            "bjhk,bjhv->bhkv", key, masked(self.written), precision="highest"
        )
        return jnp.exp(decay.sum(axis=1))[..., None, None] * self.before + added


def linear_open(
    inputs: LinearInputs, state: Float[Array, "batch heads key_dim value_dim"]
) -> tuple[Float[Array, "batch length heads value_dim"], OpenMemory]:
    """Returns o of a few tokens of each row, and the states that they may leave.

    A token's o depends on no token after it, be that finite or not.

    Args:
        inputs: any float dtype, of few tokens: sums over pairs of them are written out.
        state: float32, S of each row before its first token.
    """
    query, key, value, decay, beta = jax.tree.map(
        lambda each: each.astype(jnp.float32), inputs.by_head()
    )
    asked = [query] if beta is None else [query, key]
    found = jnp.einsum(
        "bhkv,bihkn->bihnv", state, jnp.stack(asked, axis=-1), precision="highest"
    )
    total, since = jnp.zeros_like(decay[:, 0]), decay[:, :0]
    outs: list[Array] = []
    wrote: list[Array] = []

    def read(asked: Array, since: Array) -> Array:
        """Reads what the tokens wrote so far, [batch, heads, value]."""
        count = len(wrote)
        overlaps = jnp.sum(key[:, :count] * asked[:, None], axis=-1)
        weights = jnp.exp(since[:, :count]) * overlaps
        return jnp.sum(weights[..., None] * jnp.stack(wrote, axis=1), axis=1)

    for i in range(value.shape[1]):
        total += decay[:, i]
        # The decays since each token before, and since this one.
        since = jnp.pad(since + decay[:, i : i + 1], ((0, 0), (0, 1), (0, 0)))
        of_state, written = jnp.exp(total)[..., None, None] * found[:, i], value[:, i]
        if beta is not None:
            known = of_state[:, :, 1]
            if wrote:
                known += read(key[:, i], since)
            written = beta[:, i, :, None] * (written - known)
        wrote.append(written)
        outs.append(of_state[:, :, 0] + read(query[:, i], since))
    opened = OpenMemory(state, key, jnp.stack(wrote, axis=1), decay)
    return jnp.stack(outs, axis=1), opened
