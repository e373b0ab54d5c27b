"""The card of a saved model: its metadata, and what it never tells."""

import json
import shlex
from dataclasses import asdict

import pytest
import yaml

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import ProcessesConfig
from jaxrl_post.records.directory import RunDescription
from jaxrl_post.records.hub.card import converted_card, front_matter, run_card

INTERVAL = {"eval/accuracy_low": 0.25, "eval/accuracy_high": 0.5}
ROWS = [
    {"step": 0, "metrics": {"eval/accuracy": 0.125}},
    {"step": 1, "metrics": {"reward/mean": 0.1, "train/loss": None}},
    {"step": 7, "metrics": {"reward/mean": 0.5, "eval/accuracy": 0.375, **INTERVAL}},
]


def described(config, *, command="", **facts):
    values = json.loads(json.dumps(asdict(config)))
    kept = {"hub": {}, "inputs": None, "head": "lm"} | facts
    return RunDescription(
        command, config.model, 1234, "dp1", {"jax": "0.12"}, values, **kept
    )


def card_of(config, *, rows=ROWS, bases=(), part="model", **facts):
    """The metadata and the text of a card."""
    description = described(config, **facts)
    card = run_card(description, rows, title="mine", bases=bases, part=part)
    _, head, text = card.split("---\n", 2)
    return yaml.safe_load(head), text


def test_the_curves_have_their_ends_and_the_accuracy_its_interval():
    _, text = card_of(RLConfig(model="demo"))
    assert "| Reward in training | 0.1 at step 1 | 0.5 at step 7 |" in text
    last = "37.5% (95 % interval 25.0% to 50.0%) at step 7"
    assert f"| Held-out accuracy | 12.5% at step 0 | {last} |" in text
    # It was not finite, at the only step that has it.
    assert "Training loss" not in text
    assert "in 7 steps" in text


def test_settings_are_those_that_differ_from_the_defaults():
    _, text = card_of(SFTConfig(model="demo", steps=7, max_tokens=24))
    table = text.partition("## Settings")[2].partition("## Versions")[0]
    names = [
        line.split("`")[1] for line in table.splitlines() if line.startswith("| `")
    ]
    assert names == ["--steps", "--max-tokens"]


def test_a_card_tells_nothing_of_the_machine():
    config = RLConfig(
        model="/home/jane doe/models/Tiny",
        env="jsonl?path=/home/jane doe/a/b.jsonl&grader=my.mod:fn&pattern=a/b",
        tools=(
            'mcp?command=["python","/opt/inner/server.py"]',
            "http?url=https://10.0.0.3:80/x&api_key=abc",
            "search?corpus=../inner/corpus.jsonl",
        ),
        data=DataConfig(eval_path="C:\\inner\\eval.jsonl"),
        run_dir="/scratch/jane/run",
        rollout=RolloutConfig(
            stop_strings=("</answer>", "/no_think", "\n\n"),
            judges="ray:10.0.0.1:6379",
        ),
        processes=ProcessesConfig(coordinator="10.0.0.2:33"),
        push_to_hub="Org/mine",
    )
    arguments = [
        "--model", config.model, "--env", config.env, "--tools", *config.tools,
        f"--data.eval-path={config.data.eval_path}", "--run-dir", config.run_dir,
        "--rollout.stop-strings", *config.rollout.stop_strings,
        f"--rollout.judges={config.rollout.judges}", "--no-resume",
        "--processes.coordinator", config.processes.coordinator,
        "--config=/home/jane doe/inner/config.json", "--push-to-hub=Org/mine",
    ]  # fmt: skip
    inputs = {"model": {"config.json": {"bytes": 3, "crc32": 5}}}
    command = f"python -m launch.grpo {shlex.join(arguments)}"
    metadata, text = card_of(config, command=command, inputs=inputs)
    for word in ("jane", "inner", "10.0.0", "abc", "6379", "/home", "/opt", "..", "C:"):
        assert word not in text.replace("://...", "").replace("key=...", "")
    assert "base_model" not in metadata
    for kept in ("Tiny", "jsonl?path=b.jsonl&grader=my.mod:fn&pattern=a/b", "server.py",
                 "corpus=corpus.jsonl", "eval.jsonl", "'</answer>' /no_think",
                 "--config=config.json"):  # fmt: skip
        assert kept in text, kept
    for left_out in ("run-dir", "judges", "processes", "resume", "push-to-hub"):
        assert left_out not in text


def test_names_on_the_hub_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = DataConfig(
        path="hf://datasets/Org/sums@v1/a.jsonl",
        eval_path="hf://datasets/Org/b/c.jsonl",
    )
    hub = {"Org/tiny@v2": "c1", "datasets/Org/sums@v1": "c2", "datasets/Org/b": "c3"}
    config = RLConfig(model="Org/tiny@v2", data=data)
    metadata, text = card_of(config, hub=hub)
    assert metadata["base_model"] == "Org/tiny"
    assert metadata["datasets"] == ["Org/sums", "Org/b"]
    assert '| `--data.path` | `"hf://datasets/Org/sums@v1/a.jsonl"` |' in text
    # A local directory of the same form is none.
    metadata, text = card_of(RLConfig(model="Org/tiny"))
    assert "base_model" not in metadata
    assert "Made from `tiny`" in text


def test_a_text_cannot_break_the_page():
    config = RLConfig(model="demo", env="x|y`z\n# Heading")
    metadata, text = card_of(config, command="python -m launch.grpo --env '|`\n# B'")
    assert metadata["tags"] == ["jaxrl_post", "grpo", "reinforcement-learning"]
    assert "\n# Heading" not in text
    assert "\n# B" not in text
    assert "x\\|y'z" in text


CARDS = {
    b"---\nlicense: mit\n---\n": {"license": "mit"},
    b"---\r\nlicense: mit\r\n---\r\nText": {"license": "mit"},
    b"---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\nx: 1\n---\n": {
        "license": "other", "license_name": "own", "license_link": "LICENSE"
    },
    b"---\nlicense: mit\nbase_model: [Org/base]\n---\n": {
        "license": "mit", "base_model": "Org/base"
    },
    b"---\nbase_model: /home/jane/x\n---\n": {},
    b"---\nbase_model: [Org/a, Org/b]\n---\n": {},
    b"---\nlicense: [mit]\n---\n": {},
    b"---\nlicense: 3\n---\n": {},
    b"---\n- license\n---\n": {},
    b"---\nlicense: [\n---\n": {},
    b"---\nlicense: mit\n": {},
    b"---\n" + b"[" * 100_000 + b"\n---\n": {},
    b"# License: mit\n": {},
    b"\xff\xfe---": {},
    b"": {},
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(CARDS)))
def test_the_license_is_that_of_the_bases_card(tmp_path, number):
    card, wanted = list(CARDS.items())[number]
    (tmp_path / "README.md").write_bytes(card)
    metadata, _ = card_of(SFTConfig(model=str(tmp_path)), bases=[tmp_path])
    own = ("library_name", "pipeline_tag", "tags")
    assert {k: v for k, v in metadata.items() if k not in own} == wanted


def test_no_card_of_the_base(tmp_path):
    assert front_matter(tmp_path) == front_matter(tmp_path / "none") == {}
    (tmp_path / "README.md").mkdir()
    assert front_matter(tmp_path) == {}


@pytest.mark.parametrize(
    ("part", "head", "library", "task"),
    [
        ("model", "lm", "transformers", "text-generation"),
        ("model", "value", "transformers", "text-classification"),
        ("model", "process", "transformers", "token-classification"),
        ("adapter", "lm", "peft", "text-generation"),
        ("critic", "lm", "transformers", None),
        ("critic_adapter", "lm", "peft", None),
    ],
)
def test_a_part_has_its_library_and_task(part, head, library, task):
    metadata, text = card_of(RLConfig(model="demo"), part=part, head=head)
    assert metadata["library_name"] == library
    assert metadata.get("pipeline_tag") == task
    assert ("lora" in metadata["tags"]) == ("adapter" in part)
    assert ("Results" in text) == (not part.startswith("critic"))


def test_a_converted_model_keeps_its_metadata(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\nOld\n")
    source = str(tmp_path / "inner" / "source")
    card = converted_card(source, folder=tmp_path, title="t", on_hub=False)
    assert "Converted from `source` by" in card
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "transformers", "license": "mit", "tags": ["jaxrl_post", "a"]
    }  # fmt: skip
    card = converted_card("Org/a@v1", folder=tmp_path, title="t", on_hub=True)
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "Org/a"
