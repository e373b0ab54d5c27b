"""Plays episodes of an environment of verifiers, for `verifiers.py`.

It is run as a plain file by the Python that has verifiers, so it imports nothing of
this library. It first tells the tasks. Then each line of standard input is a request,
and each line of standard output its answer, all of them JSON. The end of the input ends
the process.
"""

import asyncio
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

# Seconds for what an episode has started to end with this process.
GRACE = 10.0
# No variable has this name, so that no key of the user's is sent.
NO_KEY = "JAXRL_POST_NO_KEY"


def told(task):
    """The text of a task's prompt."""
    prompt = task.data.prompt
    if isinstance(prompt, str) or prompt is None:
        parts = [prompt]
    else:
        parts = [message.content for message in prompt]
    texts = [task.data.system_prompt, *parts]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def problem(task):
    """A hash of all that makes a task; copies of one have the same."""
    data = task.data.model_dump(mode="json", exclude={"idx", "name"})
    text = json.dumps(data, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


async def played(env, task, base_url):
    """Carries out an episode; why there is no reward is an answer, too."""
    vf = importlib.import_module("verifiers.v1")
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
    episode = await env.run_episode(task, vf.ModelContext("policy", client))
    traces = episode.traces
    errors = [*episode.errors, *(error for each in traces for error in each.errors)]
    if errors:
        return {"error": "; ".join(f"{each.type}: {each.message}" for each in errors)}
    if len(traces) != 1:
        return {"error": f"an episode must have one agent, got {len(traces)}"}
    (trace,) = traces
    if trace.rewards and all(each is None for each in trace.rewards.values()):
        return {"error": "the episode was not scored"}
    parts = {name: each.score for name, each in trace.rewards.items() if each}
    return {"reward": trace.reward, "parts": parts}


def read(loop, requests, serving):
    """Hands requests over; at the end of the input the process ends."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(serving.cancel)
    time.sleep(GRACE)
    os._exit(0)


async def serve(config, most, answers):
    """Tells the tasks, and plays them until it is cancelled."""

    def say(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    vf = importlib.import_module("verifiers.v1")
    env = vf.load_environment(vf.resolve_env_config(config))
    tasks = list(itertools.islice(iter(env.taskset), most))
    say({"tasks": [[told(task), problem(task)] for task in tasks]})
    requests = asyncio.Queue()
    arguments = asyncio.get_running_loop(), requests, asyncio.current_task()
    threading.Thread(target=read, args=arguments, daemon=True).start()
    async with env.serving():
        while True:
            asked = await requests.get()
            say(await played(env, tasks[asked["task"]], asked["base_url"]))


def main():
    """Serves the environment of the configuration in a file."""
    path, most = sys.argv[1:]
    # Keep what an environment prints out of the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(config, int(most), answers))


if __name__ == "__main__":
    main()
