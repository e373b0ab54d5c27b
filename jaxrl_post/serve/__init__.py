"""Interfaces of other programs to the sampler: an HTTP server with OpenAI's API."""
