"""The files that start a run on a cluster: they parse, and start again what died."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxrl_post.config.serve import ServeConfig
from launch import cli, grpo, serve
from launch.several import AGAIN

PODS = Path(__file__).parents[2] / "launch" / "pods"
RUN = ["launch.grpo", "--mesh=dp4,tp8", "--run-dir=/shared/my runs/a"]
KILLED = 128 + 9

pytestmark = pytest.mark.processes


def attempts(
    folder: Path, script: str, command: str, statuses: list[int], **environment: str
) -> tuple[int, list[list[str]]]:
    """Runs a script against a cluster's command that ends with these statuses.

    Returns the script's status, and the arguments of every call of the command.
    """
    calls = folder / "calls"
    calls.mkdir()
    stand_in = folder / command
    stand_in.write_text(
        "#!/usr/bin/env bash\n"
        f"number=$(ls {shlex.quote(str(calls))} | wc -l)\n"
        f"statuses=({' '.join(map(str, statuses))})\n"
        f'printf "%s\\n" "$@" > {shlex.quote(str(calls))}/$number\n'
        'exit "${statuses[$number]}"\n'
    )
    stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", str(PODS / script), *RUN],
        env={
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    files = sorted(calls.iterdir(), key=lambda file: int(file.name))
    return done.returncode, [file.read_text().splitlines() for file in files]


@pytest.mark.parametrize(
    ("statuses", "status", "calls"),
    [
        # A death, another one, then the end of the run.
        ([KILLED, AGAIN, 0], 0, 3),
        # A wrong option fails every time.
        ([1, 0], 1, 1),
        ([2, 0], 2, 1),
        # At some point a person must look.
        ([KILLED] * 4, KILLED, 3),
    ],
)
def test_slurm_starts_again_what_died(tmp_path, statuses, status, calls):
    found, made = attempts(tmp_path, "slurm.sbatch", "srun", statuses, ATTEMPTS="3")
    assert (found, len(made)) == (status, calls)
    for call in made:
        assert call[-len(RUN) - 2 :] == [".venv/bin/python", "-m", *RUN]
        # The processes say who died before they end: Slurm must not end them first.
        assert "--kill-on-bad-exit=0" in call


def test_an_image_has_the_files_and_extras_that_it_names():
    root = PODS.parents[1]
    text = (PODS / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [
        file
        for line in text.splitlines()
        if line.startswith("COPY ")
        for file in line.split()[1:-1]
    ]
    assert all((root / file).exists() for file in copied)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = [project["readme"], "pyproject.toml", *project["license-files"]]
    assert {file.partition("/")[0] for file in needed} <= {*copied}
    named = re.findall(r"EXTRAS=(\S+)", text)
    assert len(named) == 2
    for extras in named:
        assert {*extras.split(",")} <= project["optional-dependencies"].keys()


def test_slurm_gives_every_host_one_process_and_time_to_save():
    lines = (PODS / "slurm.sbatch").read_text().splitlines()
    options = [line.split(" ", 1)[1] for line in lines if line.startswith("#SBATCH")]
    assert "--ntasks-per-node=1" in options
    assert "--signal=TERM@120" in options


@pytest.mark.parametrize(
    ("statuses", "soonest", "status", "calls"),
    [
        ([1, 1, 0], "0", 0, 3),
        ([1] * 4, "0", 1, 3),
        # It failed at once, so it would again.
        ([1, 0], "60", 1, 1),
    ],
)
def test_tpu_hosts_are_started_again(tmp_path, statuses, soonest, status, calls):
    found, made = attempts(
        tmp_path, "tpu_vm.sh", "gcloud", statuses,
        ATTEMPTS="3", SOONEST_S=soonest, TPU="my-tpu", ZONE="a-zone", FOLDER="my code",
    )  # fmt: skip
    assert (found, len(made)) == (status, calls)
    for call in made:
        assert call[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu"]
        assert {"--zone=a-zone", "--worker=all"} <= set(call)
        [remote] = [part for part in call if part.startswith("--command=")]
        # The command as the shell of a host reads it.
        assert shlex.split(remote.removeprefix("--command=")) == [
            "cd", "my code", "&&", ".venv/bin/python", "-m", *RUN,
        ]  # fmt: skip


def test_a_tpu_must_be_named(tmp_path):
    found, made = attempts(tmp_path, "tpu_vm.sh", "gcloud", [0], ZONE="a-zone")
    assert (found != 0, made) == (True, [])


JOBSETS = ["jobset.yaml", "jobset_samplers.yaml"]


def manifest_of(file: str) -> dict:
    manifest = yaml.safe_load((PODS / file).read_text())
    assert json.dumps(manifest)  # Nothing in it that is YAML alone.
    return manifest


def job_of(manifest: dict, index: int) -> tuple[str, dict, dict]:
    """The name, the job and the container of a replicated job."""
    replicated = manifest["spec"]["replicatedJobs"][index]
    job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    return replicated["name"], job, container


def shown(manifest: dict, container: dict, index: int) -> list[str]:
    """The arguments that a container gives the program, as its shell reads them."""
    [script] = container["args"]
    assert [each["name"] for each in container["env"]] == ["JOBSET_NAME"]
    return subprocess.run(
        ["/bin/sh", "-c", script.replace("exec python -m", "printf '%s\\n'")],
        env={
            "JOBSET_NAME": manifest["metadata"]["name"],
            "JOB_COMPLETION_INDEX": str(index),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()


@pytest.mark.parametrize("file", JOBSETS)
def test_a_jobset_starts_again_what_died_and_nothing_else(file):
    manifest = manifest_of(file)
    assert manifest["apiVersion"].startswith("jobset.x-k8s.io/")
    spec = manifest["spec"]
    assert spec["network"] == {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
    }
    name, job, container = job_of(manifest, 0)
    assert job["parallelism"] == job["completions"]
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    # An error of the program ends the job for good; a death does not.
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [1, 2]
    assert AGAIN not in rule["onExitCodes"]["values"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    [failure] = spec["failurePolicy"]["rules"]
    assert failure.pop("targetReplicatedJobs", [name]) == [name]
    assert failure == {
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    # podFailurePolicy requires it, and a container that restarts alone has no peers.
    assert job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("file", JOBSETS)
def test_a_jobset_names_what_is_trained_on(file):
    [script] = job_of(manifest_of(file), 0)[2]["args"]
    given = {each.partition("=")[0] for each in script.split()}
    assert {"--model", "--env", "--data.path", "--run-dir"} <= given


@pytest.mark.parametrize("file", JOBSETS)
def test_the_pods_of_a_jobset_give_the_program_its_processes(file):
    manifest = manifest_of(file)
    jobs, job, container = job_of(manifest, 0)
    given, name = shown(manifest, container, 3), manifest["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert given[0] == "launch.grpo"
    # JobSet's name of the first pod of the first job.
    assert f"--processes.coordinator={name}-{jobs}-0-0.{name}:{port}" in given
    assert f"--processes.count={job['completions']}" in given
    assert "--processes.index=3" in given


def test_samplers_of_a_jobset_find_the_trainer_and_start_again_alone():
    manifest = manifest_of("jobset_samplers.yaml")
    (trainer, _, training), (_, job, sampling) = (job_of(manifest, i) for i in (0, 1))
    name = manifest["metadata"]["name"]
    given, follow = (shown(manifest, each, 0) for each in (training, sampling))
    port = training["ports"][1]["containerPort"]
    assert f"--fleet.listen=0.0.0.0:{port}" in given
    assert f"--samplers=any:{job['completions']}" in given
    assert follow[0] == "launch.serve"
    # Process 0 of the trainer has the hub.
    assert f"--follow=http://{name}-{trainer}-0-0.{name}:{port}" in follow
    # Both programs read the same key, from the folder of the same secret.
    assert "--fleet.key-file=/key/key" in given
    assert "--api-key-file=/key/key" in follow
    # Samplers fetch parameters from each other, at the server's default port.
    assert "--host=0.0.0.0" in follow
    assert sampling["ports"] == [{"containerPort": ServeConfig().port}]
    # A dead sampler is started again; the end of the trainer is the end of the run.
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert job["backoffLimit"] > 1000
    assert "podFailurePolicy" not in job
    assert manifest["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": [trainer],
    }
    assert cli.read_options(grpo.PROGRAM, given[1:]).remote_samplers == 4
    assert cli.read_options(serve.PROGRAM, follow[1:]).mesh == "tp8"
