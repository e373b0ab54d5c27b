"""Faults of the Pallas kernels and of what chooses them."""

from tests.mutations.fault import Fault

__all__ = ["KERNELS"]

KERNELS = [
    Fault(
        "a kernel shows a token to the one after its segment",
        "kernels/attention/pallas_tpu.py",
        "(index < facts[:, 2:3])",
        "(index <= facts[:, 2:3])",
        "kernels/test_attention.py kernels/test_pallas_tpu.py",
    ),
    Fault(
        "a tile that a window cuts is not masked",
        "kernels/attention/tpu_tiles.py",
        "            full &= high.positions - first.positions < settings.window\n",
        "",
        "kernels/test_attention.py kernels/test_pallas_tpu.py",
    ),
    Fault(
        "a kernel's list ends one tile early",
        "kernels/attention/tpu_tiles.py",
        "return cls(sums, 2 * others + full, count[None])",
        "return cls(sums, 2 * others + full, count[None] - 1)",
        "kernels/test_attention.py kernels/test_pallas_tpu.py",
    ),
    Fault(
        "the chunks of a row count alike in its attention",
        "kernels/attention/packed.py",
        "    normalizer = jnp.logaddexp(one[1], other[1])\n",
        "    normalizer = jnp.maximum(one[1], other[1])\n",
        "kernels/test_attention.py",
    ),
    Fault(
        "the gradient of a chunk's keys ends on the wrong device",
        "kernels/attention/packed.py",
        "gradients = d_query, *_next(plan, of_chunk)",
        "gradients = d_query, *of_chunk",
        "kernels/test_attention.py",
    ),
    Fault(
        "a token of a row's later half takes from the first half",
        "sharding/chunks.py",
        "offset = jnp.where(late, self.piece + offset, offset)",
        "offset = jnp.where(late, offset, offset)",
        "sharding/test_chunks.py",
    ),
    Fault(
        "the vocabulary's padding has probability on a TPU",
        "kernels/token_logprob/pallas_tpu.py",
        "jnp.where(column < limit[0], logits, MASKED)",
        "jnp.where(column < settings.columns, logits, MASKED)",
        "kernels/test_token_logprob.py",
    ),
    Fault(
        "what lies behind the weight counts",
        "kernels/token_logprob/pallas_tpu.py",
        "    if settings.columns % tile:\n",
        "    if False:\n",
        "kernels/test_pallas_tpu.py kernels/test_token_logprob.py",
    ),
    Fault(
        "a kernel's target is any device's token with this number",
        "kernels/token_logprob/pallas_tpu.py",
        "(ids >= 0) & (own >= 0) & (own < self.settings.columns)",
        "(ids >= 0) & (own >= 0)",
        "kernels/test_token_logprob.py",
    ),
    Fault(
        "new tokens are written to the first of two blocks alone",
        "kernels/decode_attention/pallas_tpu_write.py",
        "visits = 1 if count == 1 else 2",
        "visits = 1",
        "kernels/test_write_entries.py",
    ),
    Fault(
        "decoding leaves the last block out",
        "kernels/decode_attention/pallas_tpu.py",
        "number, end = pl.program_id(1), count[0] - 1",
        "number, end = pl.program_id(1), count[0] - 2",
        "kernels/test_decode_pallas_tpu.py",
    ),
    Fault(
        "decoding reads blocks that a window hides",
        "kernels/decode_attention/pallas_tpu.py",
        "        active &= last > queries(at, NO_TOKEN).min(axis=-1) - window\n",
        "",
        "kernels/test_decode_pallas_tpu.py",
    ),
    Fault(
        "a query without a key divides by 0",
        "kernels/decode_attention/pallas_tpu.py",
        "jnp.where(total[...] == 0.0, 1.0, total[...])",
        "total[...]",
        "kernels/test_decode_attention.py",
    ),
    Fault(
        "another implementation takes the place of the one that was asked for",
        "kernels/dispatch.py",
        "    where = PLATFORMS.get(wanted, here)\n",
        "    where = here\n",
        "kernels/test_dispatch.py",
    ),
    Fault(
        "the vocabulary's padding has probability on a GPU",
        "kernels/token_logprob/pallas_gpu.py",
        "(column >= block.begin(tile)[0]) & (column < limit)",
        "(column >= block.begin(tile)[0])",
        "kernels/test_token_logprob_pallas_gpu.py",
    ),
    Fault(
        "columns of two chunks of the vocabulary count twice",
        "kernels/token_logprob/pallas_gpu.py",
        "(column >= begin) & (column < limit)",
        "(column < limit)",
        "kernels/test_token_logprob_pallas_gpu.py",
    ),
    Fault(
        "a warpgroup hands its operands back before it has read them",
        "kernels/token_logprob/pallas_gpu.py",
        "                plgpu.wgmma_wait(1)\n",
        "                plgpu.barrier_arrive(self.consumed.at[slot])\n",
        "kernels/test_token_logprob_pallas_gpu.py",
    ),
    Fault(
        "ranges of the vocabulary have one maximum",
        "kernels/token_logprob/pallas_gpu.py",
        "    shrink = jnp.exp(own - top)\n",
        "    shrink = jnp.ones_like(own)\n",
        "kernels/test_token_logprob_pallas_gpu.py",
    ),
]
