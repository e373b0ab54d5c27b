"""Text to tokens, tokens to packed rows."""
