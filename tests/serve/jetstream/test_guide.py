"""docs/how-to/jetstream.md: its server answers its client."""

import builtins
import re
import socket
from pathlib import Path

from jaxrl_post.pretrained import save
from tests import tiny
from tests.serve.jetstream.conftest import (
    CONFIG,
    expected,
    greedy,
    make_tokenizer,
    needs_jetstream,
    without_stop,
)

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "jetstream.md"


@needs_jetstream
def test_the_server_of_the_guide_answers_its_client(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    text = GUIDE.read_text(encoding="utf-8").replace("9000", port)
    server, client = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    params, tokenizer = tiny.params(CONFIG), make_tokenizer()
    save(tmp_path / "runs/gsm8k/model", CONFIG, params)
    tokenizer.save(tmp_path / "runs/gsm8k/model")
    monkeypatch.chdir(tmp_path)
    asked = []

    def enter(prompt: str) -> str:
        asked.append(prompt)
        exec(client, {})
        return ""

    monkeypatch.setattr(builtins, "input", enter)
    exec(server, {})
    assert asked == [f"serving at 127.0.0.1:{port}; Enter ends it"]
    (ids,) = expected(params, [tokenizer.encode("12+30=")], greedy(tokenizer, 8))
    assert capsys.readouterr().out == tokenizer.decode(without_stop(ids, tokenizer))
