"""Attention of decoding: keys that several sequences share, and keys of each alone."""

from jaxrl_post.kernels.decode_attention.api import SharedKeys, decode_attention

__all__ = ["SharedKeys", "decode_attention"]
