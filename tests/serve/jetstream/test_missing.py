"""Without JetStream the adapter is imported, and its error says what to install."""

import sys

import pytest

from jaxrl_post.serve.jetstream import library


def test_the_extra_and_the_lean_install_are_named(monkeypatch):
    # None in sys.modules marks a module that is known to be missing.
    monkeypatch.setitem(sys.modules, "jetstream.engine.engine_api", None)
    monkeypatch.setitem(sys.modules, "jetstream", None)
    message = r"'.*\[jetstream\]'.*--no-deps google-jetstream==0\.2\.2"
    with pytest.raises(ModuleNotFoundError, match=message) as missing:
        library.load.__wrapped__()
    assert missing.value.name.startswith("jetstream")
    assert "seqio" not in sys.modules
