"""Names on the hub: what is fetched, from which commit, and what is said otherwise."""

import io
import json
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import PreferenceConfig, PreferenceLossConfig, SFTConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.programs.hub import fetch
from tests.hub_server import Hub, commit_of, point_client_at, serving

CONFIG = json.dumps({"model_type": "qwen2"}).encode()
FILES = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "additional_chat_templates/rag.jinja": b"x",
    # For its license.
    "README.md": b"x",
    # The same weights once more, and what no program reads.
    "pytorch_model.bin": b"no",
    "model.gguf": b"no",
    "consolidated.safetensors": b"no",
    "onnx/model.onnx": b"no",
    "original/model.safetensors": b"no",
}
READ = {name for name, content in FILES.items() if content != b"no"}
ROWS = b'{"question": "1+1", "answer": "#### 2"}\n'


@pytest.fixture
def hub():
    return Hub(
        {
            "models/Org/tiny": {"main": FILES, "v1": {**FILES, "config.json": b"{}"}},
            "models/Org/other": {"main": FILES},
            "models/Org/old": {"main": {"config.json": CONFIG, "model.bin": b"no"}},
            "models/Org/text": {"main": {"README.md": b"no"}},
            "datasets/Org/sums": {
                "main": {"data/train [1].jsonl": ROWS, "data/other.jsonl": b"no"},
                "refs/convert/parquet": {"train.parquet": b"p"},
            },
        },
        gated={"models/Org/closed"},
    )


@pytest.fixture
def served(hub, tmp_path, monkeypatch):
    with serving(hub, str(tmp_path / "cache"), monkeypatch):
        yield hub


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_a_model_is_fetched_with_the_files_that_are_read(served, console):
    fetched = fetch(SFTConfig(model="Org/tiny"), console=console)
    folder = Path(fetched.config.model)
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == READ
    assert {name.removeprefix("models/Org/tiny/") for name in served.asked} == READ
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert fetched.commits == {"Org/tiny": commit_of("main")}
    assert fetched.named(fetched.config) == SFTConfig(model="Org/tiny")
    assert f"Org/tiny: commit {commit_of('main')[:12]} in " in console.file.getvalue()


@pytest.mark.parametrize(
    "config",
    [SFTConfig(model="Org/tiny", revision="v1"), SFTConfig(model="Org/tiny@v1")],
)
def test_a_revision_of_the_model(served, console, config):
    fetched = fetch(config, console=console)
    assert (Path(fetched.config.model) / "config.json").read_text() == "{}"
    assert fetched.commits == {"Org/tiny@v1": commit_of("v1")}
    assert fetched.named(fetched.config) == config


def test_every_option_that_takes_a_directory_takes_a_name(served, console):
    policy = RLConfig(
        model="Org/tiny",
        algorithm=AlgorithmConfig(reference="Org/other", kl_coefficient=0.1),
        critic=CriticConfig(model="Org/tiny@v1"),
        rollout=RolloutConfig(draft="Org/other"),
        data=DataConfig(
            path="hf://datasets/Org/sums/data/train [1].jsonl",
            eval_path="hf://datasets/Org/sums@refs/convert/parquet/train.parquet",
        ),
    )
    fetched = fetch(policy, console=console)
    found = fetched.config
    for path in (
        found.model,
        found.algorithm.reference,
        found.critic.model,
        found.rollout.draft,
    ):
        assert (Path(path) / "model.safetensors").is_file()
    assert Path(found.data.path).read_bytes() == ROWS
    assert Path(found.data.eval_path).read_bytes() == b"p"
    assert fetched.commits == {
        "Org/tiny": commit_of("main"),
        "Org/other": commit_of("main"),
        "Org/tiny@v1": commit_of("v1"),
        "datasets/Org/sums": commit_of("main"),
        "datasets/Org/sums@refs/convert/parquet": commit_of("refs/convert/parquet"),
    }
    assert not any("other.jsonl" in name for name in served.asked)
    assert fetched.named(found) == policy
    pairs = PreferenceConfig(loss=PreferenceLossConfig(reference="Org/other"))
    reference = fetch(pairs, console=console).config.loss.reference
    assert Path(reference).name == commit_of("main")


def test_what_is_on_this_machine_is_left_alone(served, console, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("Org/tiny").mkdir(parents=True)
    for name in ("Org/tiny", "demo", "../Org/tiny", "/Org/tiny", "a/b/c"):
        config = SFTConfig(model=name, data=DataConfig(path="Org/sums"))
        fetched = fetch(config, console=console)
        assert (fetched.config, fetched.commits) == (config, {})
    assert served.asked == []
    with pytest.raises(ConfigError, match=r"^--revision: is of a model on the hub"):
        fetch(SFTConfig(model="Org/tiny", revision="v1"), console=console)


def test_a_run_that_goes_on_keeps_its_commit(served, console):
    first = fetch(SFTConfig(model="Org/tiny"), console=console)
    repository = served.repositories["models/Org/tiny"]
    served.commits["models/Org/tiny", "main"] = commit_of("later")
    served.commits["models/Org/tiny", "before"] = commit_of("main")
    repository["before"] = FILES
    repository["main"] = {**FILES, "model.safetensors": b"other weights"}
    again = fetch(SFTConfig(model="Org/tiny"), console=console, pinned=first.commits)
    assert again == first
    anew = fetch(SFTConfig(model="Org/tiny"), console=console)
    assert anew.commits == {"Org/tiny": commit_of("later")}
    weights = Path(anew.config.model) / "model.safetensors"
    assert weights.read_bytes() == b"other weights"


def test_a_plan_needs_no_weights(served, console):
    fetched = fetch(SFTConfig(model="Org/old"), console=console, weights=False)
    assert served.asked == ["models/Org/old/config.json"] * len(served.asked)
    assert (Path(fetched.config.model) / "config.json").read_bytes() == CONFIG


def unreachable(monkeypatch, cache):
    """A port on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    point_client_at(f"http://127.0.0.1:{port}", str(cache), monkeypatch)


def test_without_a_connection_the_cache_serves(hub, console, tmp_path, monkeypatch):
    config = SFTConfig(
        model="Org/tiny",
        data=DataConfig(path="hf://datasets/Org/sums/data/train [1].jsonl"),
    )
    with serving(hub, str(tmp_path / "cache"), monkeypatch):
        first = fetch(config, console=console)
    unreachable(monkeypatch, tmp_path / "cache")
    assert fetch(config, console=console) == first
    other = DataConfig(path="hf://datasets/Org/sums/data/other.jsonl")
    with pytest.raises(
        ConfigError,
        match=r"^--model: there is no Org/other on this machine, and the hub cannot be "
        r"asked for it: .*`hf download Org/other --revision v1` downloads it$",
    ):
        fetch(SFTConfig(model="Org/other", revision="v1"), console=console)
    with pytest.raises(
        ConfigError,
        match=r"^--data.path: .*incomplete.*`hf download Org/sums data/other.jsonl "
        r"--repo-type dataset` downloads it",
    ):
        fetch(SFTConfig(data=other), console=console)


def test_an_unfinished_download_is_not_taken_for_the_model(
    hub, console, tmp_path, monkeypatch
):
    config = SFTConfig(model="Org/tiny")
    with serving(hub, str(tmp_path / "cache"), monkeypatch):
        fetch(config, console=console, weights=False)
    unreachable(monkeypatch, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"^--model: .*incomplete: 4 file\(s\)"):
        fetch(config, console=console)


def test_without_the_extra_it_is_named(console, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ConfigError,
        match=r"^--model: there is no Qwen/Qwen2.5-0.5B on this machine.*pip install "
        r"-e '\.\[hub\]', or run `hf download Qwen/Qwen2.5-0.5B --local-dir",
    ):
        fetch(SFTConfig(model="Qwen/Qwen2.5-0.5B"), console=console)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SFTConfig(model="Org/none"),
            r"^--model: Org/none is neither a directory nor a preset, no model on the "
            r"hub that can be read; correct the name, or log in with `hf auth login`",
        ),
        (SFTConfig(model="Org/closed"), r"^--model: the model Org/closed is gated"),
        (
            SFTConfig(model="Org/tiny", revision="v9"),
            r"^--model: the model Org/tiny has no revision 'v9'$",
        ),
        (
            SFTConfig(model="Org/tiny@v1", revision="v1"),
            r"^--revision: Org/tiny@v1 has a revision of its own; give one of the two",
        ),
        (SFTConfig(model="Org/old"), r"^--model: Org/old has no weights in safetens"),
        (SFTConfig(model="Org/text"), r"^--model: Org/text has no config.json; it is"),
        (
            SFTConfig(data=DataConfig(path="hf://datasets/Org/sums/none.jsonl")),
            r"^--data.path: the data set Org/sums has no file 'none.jsonl' at main",
        ),
        (
            SFTConfig(data=DataConfig(eval_path="hf://datasets/Org/none/x.jsonl")),
            r"^--data.eval-path: Org/none is no data set on the hub that can be read",
        ),
        (
            SFTConfig(data=DataConfig(path="hf://Org/sums/train.jsonl")),
            r"^--data.path: must be hf://datasets/ORG/NAME/FILE, or .*; got 'hf://Org",
        ),
        (
            SFTConfig(data=DataConfig(path="hf://datasets/Org/sums/../../x")),
            r"^--data.path: must be hf://datasets/ORG/NAME/FILE",
        ),
    ],
)
def test_what_cannot_be_fetched_is_named(served, console, config, message):
    with pytest.raises(ConfigError, match=message):
        fetch(config, console=console)
