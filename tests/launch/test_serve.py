"""`launch.serve`: its options, its answers, and how it ends."""

import concurrent.futures
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.serve import ServeConfig, check_server
from jaxrl_post.programs.serve import _sized, _tell_unsupported
from jaxrl_post.sampler import EngineConfig
from launch import evaluate, serve
from tests import compiled

ROOT = Path(__file__).parents[2]
SMALL = ("--max-model-len=56", "--num-slots=4", "--mesh=dp1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_an_open_address_needs_a_key(host, tmp_path):
    with pytest.raises(ConfigError, match=r"--host: .* give --api-key-file"):
        check_server(ServeConfig(model="demo", host=host))
    key = tmp_path / "key"
    key.write_text("secret")
    check_server(ServeConfig(model="demo", host=host, api_key_file=str(key)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_none(host):
    check_server(ServeConfig(model="demo", host=host))


def test_a_missing_key_file_is_an_error():
    with pytest.raises(ConfigError, match="--api-key-file: there is no file nowhere"):
        check_server(ServeConfig(model="demo", api_key_file="nowhere"))


def test_a_port_that_is_taken_is_an_error_before_the_model_is_opened(model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([f"--model={model}", f"--port={port}"]) == 1
    assert f"--port: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_is_refused(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert serve.main([f"--model={tmp_path / 'run'}", "--port=0"]) == 1
    assert "has checkpoints but no config.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # (max_model_len, max_tokens, cache_tokens) of 64 slots: by default the model's
        # context, and as many tokens of the cache for each slot, with two pages.
        ({}, (1024, 512, 64 * (1024 + 32))),
        ({"max_tokens": 1000}, (1024, 1000, 64 * (1024 + 32))),
        ({"max_model_len": 100}, (100, 50, 64 * (100 + 32))),
        # A cache that is given bounds the budget: eight pages less two.
        ({"cache_tokens": 128}, (96, 48, 128)),
        ({"context": 40_960}, (40_960, 1024, 64 * (2048 + 32))),
        ({"context": 10**6}, (64 * (2048 + 32) - 32, 1024, 64 * (2048 + 32))),
        # Each of eight parts holds an eighth.
        ({"context": 10**6, "split": 8}, (8 * 2080 - 32, 1024, 64 * 2080)),
        # A budget that is given has the cache that it needs.
        (
            {"context": 10**6, "max_model_len": 500_000, "split": 8},
            (500_000, 1024, 8 * (500_000 + 32)),
        ),
        ({"context": 64, "num_slots": 1}, (64, 32, 64 + 32)),
    ],
)
def test_sizes_that_are_not_given_fit_the_model_and_the_cache(given, expected):
    context, split = given.pop("context", 1024), given.pop("split", 1)
    sized = _sized(ServeConfig(model="demo", **given), context, split)
    assert (sized.max_model_len, sized.max_tokens, sized.cache_tokens) == expected
    sizes = EngineConfig(
        num_slots=sized.num_slots,
        max_prompt_tokens=sized.max_model_len - 1,
        max_tokens=sized.max_model_len - 1,
        context_tokens=sized.max_model_len,
        cache_tokens=sized.cache_tokens,
    )
    assert sizes.max_length == sized.max_model_len
    # No error: every part of the cache holds the longest sample.
    assert sizes.num_pages(split) >= sized.cache_tokens // 16


def test_a_cache_or_a_budget_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="--max-model-len: must be at least 2"):
        check_server(ServeConfig(model="demo", max_model_len=1))
    config = ServeConfig(model="demo", cache_tokens=300)
    with pytest.raises(ConfigError, match="--cache-tokens: must be at least 384"):
        _sized(config, 1024, 8)


class Program:
    """`python -m launch.serve` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.cache = compiled.borrow()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.serve", "--port=0", *SMALL, *arguments],
            cwd=ROOT,
            env={
                "JAX_PLATFORMS": "cpu",
                "HOME": str(self.cache),
                "PATH": "/usr/bin:/bin",
                "JAX_ENABLE_COMPILATION_CACHE": "true",
                "JAX_COMPILATION_CACHE_DIR": str(self.cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        # Ends a program that never says where it listens.
        watch = threading.Timer(900, self.process.kill)
        watch.start()
        self.said, self.url = "", ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            found = re.search(r"serving (\S+) at (http://\S+)/v1", line)
            if found:
                self.name, self.url = found[1], found[2]
                break
        watch.cancel()
        assert self.url, self.said

    def end(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=1200)
        return rest

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)
        compiled.give_back(self.cache, ended_well=self.process.returncode == 0)


@pytest.mark.processes
def test_greedy_answers_are_those_of_the_evaluation(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    output = tmp_path / "results.json"
    options = ("--env=even_length:EvenLength", "--max-tokens=12", "--num-tasks=6")
    arguments = [f"--model={model}", *options, f"--output={output}"]
    assert evaluate.main(arguments) == 0
    lines = output.with_suffix(".completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 6
    with (
        Program(f"--model={model}") as program,
        openai.OpenAI(base_url=f"{program.url}/v1", api_key="none") as client,
        concurrent.futures.ThreadPoolExecutor(6) as pool,
    ):

        def answer(row):
            asked = [{"role": "user", "content": row["prompt"]}]
            return client.chat.completions.create(
                model="model", messages=asked, temperature=0, max_tokens=12
            )

        for row, got in zip(rows, pool.map(answer, rows), strict=True):
            assert got.choices[0].message.content == row["completion"]
            assert got.usage.completion_tokens == row["num_tokens"]
        assert "ended" in program.end()
        assert program.process.returncode == 0


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nobody_hanging(model, number):
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 48, "ignore_eos": True, "n": 16},
    }
    with Program(f"--model={model}", "--grace-s=600") as program:
        url = f"{program.url}/inference/v1/generate"
        ends: list[object] = []

        def ask():
            try:
                ends.append(httpx.post(url, json=body, timeout=1200).status_code)
            except httpx.TransportError as error:
                ends.append(type(error))

        def taken():
            """Numbers of samples that the server has taken, and that have not ended."""
            text = httpx.get(f"{program.url}/metrics", timeout=60).text
            found = dict(re.findall(r"^jaxrl_post_(\w+)(?:{.*})? (\S+)$", text, re.M))
            waits = int(float(found["samples_under_way"]))
            return waits + int(float(found.get("samples_total", 0))), waits

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(40)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 1200
        while taken()[0] < 40 * 16:
            assert time.monotonic() < deadline
        # The signal comes in the middle: others wait for the four slots.
        assert taken()[1] > 4 * 16
        begin = time.monotonic()
        rest = program.end(number)
        for thread in threads:
            thread.join(1200)
            assert not thread.is_alive()
        assert time.monotonic() - begin < 1000
        assert "ended" in rest
        assert "Traceback" not in rest
        assert program.process.returncode == 0
        # All were taken, so all are answered.
        assert ends == [200] * 40


def test_what_the_models_defaults_ask_for_and_nobody_does_is_said(tmp_path):
    settings = {"do_sample": True, "top_k": 20, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    said = []
    for defaults in ("neutral", "model"):
        text = io.StringIO()
        console = Console(file=text)
        config = ServeConfig(model="m", sampling_defaults=defaults)
        _tell_unsupported(config, tmp_path, console)
        said.append(text.getvalue())
    assert said[0] == ""
    assert "generation_config.json asks for repetition_penalty 1.05" in said[1]
