"""Interfaces of others to the sampler: an HTTP server that speaks OpenAI's API."""
