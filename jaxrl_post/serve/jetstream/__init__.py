"""The sampler behind JetStream: an engine for its orchestrator and gRPC server.

JetStream (extra `jetstream`) is loaded when an engine is made, not on import.
"""

from jaxrl_post.serve.jetstream.engine import JetStreamEngine, jetstream_engine
from jaxrl_post.serve.jetstream.server import jetstream_server

__all__ = ["JetStreamEngine", "jetstream_engine", "jetstream_server"]
