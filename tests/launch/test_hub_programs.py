"""Programs whose options name a model and data on the hub."""

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from jaxrl_post import pretrained
from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.programs.planning import plan
from launch import convert, dpo, evaluate, sft
from tests.hub_server import Hub, commit_of, serving

pytestmark = [
    pytest.mark.processes,
    # The client uploads large files by a name that its HTTP library has given up.
    pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning"),
]

PAIRS = "".join(
    json.dumps({"prompt": f"{i}=", "chosen": "a", "rejected": "b"}) + "\n"
    for i in range(12)
).encode()


@pytest.fixture
def served(model, tmp_path, monkeypatch):
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    hub = Hub(
        {
            "models/Org/tiny": {"main": files},
            "datasets/Org/pairs": {"main": {"pairs.jsonl": PAIRS}},
        }
    )
    with serving(hub, str(tmp_path / "cache"), monkeypatch):
        yield hub


def test_a_run_from_the_hub_goes_on_from_the_commit_with_which_it_began(
    served, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    command = [
        "--model=Org/tiny", "--env=even_length:EvenLength", "--max-tokens=24",
        "--examples-per-step=8", "--eval.every=0", "--checkpoint.every=1",
        "--optimizer.schedule=constant",
    ]  # fmt: skip
    assert sft.main([*command, "--steps=1"]) == 0
    [run] = Path("runs").iterdir()
    assert run.name == "sft-even_length-EvenLength-tiny"
    described = json.loads((run / "config.json").read_text())
    assert described["model"] == described["config"]["model"] == "Org/tiny"
    assert described["config"]["run_dir"] is None
    assert described["hub"] == {"Org/tiny": commit_of("main")}
    # The branch moves to a model that could not be read.
    repository = served.repositories["models/Org/tiny"]
    repository["began"] = repository["main"]
    served.commits["models/Org/tiny", "began"] = commit_of("main")
    served.commits["models/Org/tiny", "main"] = commit_of("later")
    repository["main"] = {"config.json": b"{}", "model.safetensors": b""}
    assert sft.main([*command, "--steps=2"]) == 0
    assert "resumed at step 1 of 2" in capsys.readouterr().out
    described = json.loads((run / "config.json").read_text())
    assert described["hub"] == {"Org/tiny": commit_of("main")}
    # Nothing else names the architecture of its checkpoint.
    assert convert.main([f"--input={run}", "--output=converted"]) == 0
    _, params = pretrained.load("converted")
    _, trained = pretrained.load(run / "model")
    assert (params.embedding == trained.embedding).all()
    assert Tokenizer.from_directory("converted").stop_ids == (1,)


def test_pairs_and_a_reference_from_the_hub(served, tmp_path):
    run = tmp_path / "run"
    assert dpo.main(
        [
            "--model=Org/tiny", "--loss.reference=Org/tiny", f"--run-dir={run}",
            "--data.path=hf://datasets/Org/pairs/pairs.jsonl", "--data.eval-share=0.2",
            "--max-tokens=24", "--examples-per-step=8", "--eval.every=0", "--steps=1",
            "--lora.rank=2",
        ]
    ) == 0  # fmt: skip
    described = json.loads((run / "config.json").read_text())
    names = described["config"]
    assert names["loss"]["reference"] == "Org/tiny"
    assert names["data"]["path"] == "hf://datasets/Org/pairs/pairs.jsonl"
    assert described["hub"].keys() == {"Org/tiny", "datasets/Org/pairs"}
    # PEFT finds the base by that name on another machine.
    adapter = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "Org/tiny"


CARD = b"""---
license: apache-2.0
base_model: Org/older
---
# Tiny
"""


def parts_of(card: bytes) -> tuple[dict, str]:
    """The metadata and the text of a card."""
    _, head, text = card.decode().split("---\n", 2)
    return yaml.safe_load(head), text


def test_a_trained_model_is_pushed_with_a_card_that_tells_nothing_of_the_machine(
    served, tmp_path, capsys
):
    served.repositories["models/Org/tiny"]["main"]["README.md"] = CARD
    run = tmp_path / "run"
    command = [
        "--model=Org/tiny", "--loss.reference=Org/tiny", f"--run-dir={run}",
        "--data.path=hf://datasets/Org/pairs/pairs.jsonl", "--data.eval-share=0.2",
        "--max-tokens=24", "--examples-per-step=8", "--eval.every=0", "--steps=1",
        "--lora.rank=2", "--push-to-hub=Org/mine",
    ]  # fmt: skip
    assert dpo.main(command) == 0
    assert "Org/mine" in capsys.readouterr().out
    pushed = dict(served.repositories["models/Org/mine"]["main"])
    assert served.private["models/Org/mine"]
    metadata, text = parts_of(pushed["README.md"])
    assert metadata == {
        "base_model": "Org/tiny",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["Org/pairs"],
        "tags": ["jaxrl_post", "dpo"],
        "license": "apache-2.0",
    }
    assert "--data.path=hf://datasets/Org/pairs/pairs.jsonl" in text
    assert "--run-dir" not in text
    assert "| `--lora.rank` | `2` |" in text
    assert "| Held-out accuracy | " in text
    assert re.search(r"at step 1 \|$", text, re.MULTILINE)
    assert re.search(r"\| --data.path \| .* 12 lines, \d+ bytes, crc32 ", text)
    told = b"".join(each for name, each in pushed.items() if "safetensors" not in name)
    assert str(tmp_path).encode() not in told
    # The saved files are pushed, and no others.
    saved = {p.name: p.read_bytes() for p in (run / "model").iterdir()}
    assert saved == {k: v for k, v in pushed.items() if k != ".gitattributes"}
    adapter, _ = parts_of((run / "adapter" / "README.md").read_bytes())
    assert adapter["library_name"] == "peft"
    assert adapter["tags"] == ["jaxrl_post", "dpo", "lora"]
    assert adapter["license"] == "apache-2.0"
    # The same command does not train again, and uploads again.
    assert dpo.main(command) == 0
    # A conversion of the run has its card, and a repository of its own.
    output = tmp_path / "converted"
    options = [f"--input={run}", f"--output={output}", "--push-to-hub=Org/merged"]
    assert convert.main([*options, "--push-public"]) == 0
    assert not served.private["models/Org/merged"]
    merged, _ = parts_of(served.repositories["models/Org/merged"]["main"]["README.md"])
    assert merged == metadata


@pytest.mark.parametrize("where", ["/api/repos/create", "/commit/"])
def test_a_failed_push_is_told_and_loses_nothing(served, tmp_path, capsys, where):
    run = tmp_path / "run"
    command = [
        "--model=Org/tiny", "--env=even_length:EvenLength", "--max-tokens=24",
        "--examples-per-step=8", "--eval.every=0", "--steps=1", f"--run-dir={run}",
        "--push-to-hub=Org/mine",
    ]  # fmt: skip
    served.failing[where] = 403
    assert sft.main(command) == 1
    told = capsys.readouterr().out
    assert "error: --push-to-hub Org/mine: the token may not write there (403)" in told
    if where == "/commit/":
        assert f"`hf upload Org/mine {run}/model . --private` uploads it again" in told
        assert (run / "report.html").is_file()
    # A refusal at the start comes before the first step.
    assert (run / "model").is_dir() == (where == "/commit/")
    assert (run / "metrics.jsonl").exists() == (where == "/commit/")
    served.failing.clear()
    assert sft.main(command) == 0
    assert "README.md" in served.repositories["models/Org/mine"]["main"]


def test_an_evaluation_says_which_commit_it_measured(served, tmp_path):
    output = tmp_path / "results.json"
    options = ["--model=Org/tiny", "--env=even_length:EvenLength", "--num-tasks=2"]
    assert evaluate.main([*options, "--max-tokens=2", f"--output={output}"]) == 0
    found = json.loads(output.read_text())
    assert found["config"]["model"] == "Org/tiny"
    assert found["hub"] == {"Org/tiny": commit_of("main")}


def test_a_conversion_from_the_hub(served, tmp_path, model):
    target = tmp_path / "converted"
    options = ["--input=Org/tiny", f"--revision={commit_of('main')}"]
    assert convert.main([*options, f"--output={target}", "--format=orbax"]) == 0
    config, _ = pretrained.load(target)
    assert config == pretrained.load(model)[0]


def test_a_plan_fetches_the_configuration_alone(served):
    # Whether there is a compiler for TPUs or not.
    with pytest.raises(PlanError, match=r"^--topology: |^libtpu is not installed"):
        plan(PlanConfig("Org/tiny", "v5e:9x9"), console=Console(file=io.StringIO()))
    assert set(served.asked) == {"models/Org/tiny/config.json"}


def test_what_cannot_be_fetched_ends_a_program_before_anything_runs(served, capsys):
    assert sft.main(["--model=Org/none"]) == 1
    told = capsys.readouterr().out
    assert "error: --model: Org/none is neither a directory nor a preset" in told
    assert not Path("runs/sft-arithmetic-none").exists()
