"""The recipe about pictures, for two steps: trained, evaluated, saved."""

import json

import pytest

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.messages import PICTURE
from jaxrl_post.pretrained import load
from jaxrl_post.records.directory import read_rows

SMALL = (
    "--recipe=pictures",
    "--env=pictures?kinds=count,colour&guesses=1&train_size=64&eval_size=8",
    "--steps=2",
    "--warm-start.steps=2",
    "--warm-start.examples-per-step=8",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=4",
    "--update.microbatch-tokens=512",
    "--eval.every=2",
)


# tests/programs/test_vision.py guards the same in one process.
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("compiles a run with pictures")
def test_the_recipe_runs_and_saves_its_model_with_the_tower(run_here, tmp_path):
    run = tmp_path / "run"
    run_here("launch.grpo", *SMALL, f"--run-dir={run}")
    rows = {row["step"]: row["metrics"] for row in read_rows(run / "metrics.jsonl")}
    # The sampler's log-probs of answers to pictures are the trainer's.
    assert abs(rows[2]["mismatch/token_mult_prob_error"] - 1) < 1e-4
    assert {"eval/count/accuracy", "eval/colour/accuracy"} <= set(rows[2])

    folder = run / "model"
    written = json.loads((folder / "config.json").read_text())
    assert written["vision_config"]["patch_size"] == 4
    token = Tokenizer.from_directory(folder).encode(PICTURE)
    assert [written["image_token_id"]] == [*token]
    # That training changes it is tested in programs/test_vision.py: answers of a model
    # that has hardly begun to imitate earn nothing, so nothing is learned here.
    assert load(folder, vision=True)[1].vision is not None
