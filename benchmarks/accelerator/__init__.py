"""Measures an accelerator, in parts that fit the time of a call."""
