"""Attention of decoding: keys that several sequences share, and keys of each alone."""

from jaxrl_post.kernels.decode_attention.api import decode_attention
from jaxrl_post.kernels.decode_attention.quantized import (
    CODE_DTYPES,
    Entries,
    OwnKeys,
    QuantizedEntries,
    SharedKeys,
    quantize_entries,
)
from jaxrl_post.kernels.decode_attention.write import write_entries

__all__ = [
    "CODE_DTYPES",
    "Entries",
    "OwnKeys",
    "QuantizedEntries",
    "SharedKeys",
    "decode_attention",
    "quantize_entries",
    "write_entries",
]
