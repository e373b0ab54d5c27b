"""A conversation by verifiers' client for training, unmodified.

    python theirs.py URL TOKENIZER EPISODE

It is run by a Python that has verifiers. URL is a base URL, TOKENIZER a directory, and
EPISODE the name of the episode that is opened first, or "trace" for the id of their
trace, which their client sends with every call. What verifiers would train on is
written as JSON: of each branch the token ids, which of them were sampled, and their
log-probs.
"""

# pyright: reportMissingImports=false
import asyncio
import json
import sys
from typing import Any

import httpx
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from verifiers.v1 import graph
from verifiers.v1.clients.client import resolve_client
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.trace import Trace

SAMPLING = vf.SamplingConfig(
    max_tokens=8, temperature=0.7, structured_outputs={"regex": "[0-9]{1,4}"}
)


async def play(base: str, tokenizer: str, trace: Any) -> None:
    """Three turns, and another second turn, which makes a branch."""
    client = resolve_client(
        vf.TrainClientConfig(
            base_url=f"{base}/v1",
            renderer=Qwen3RendererConfig(),
            renderer_model_name=tokenizer,
        )
    )

    async def ask(messages: list[dict]) -> dict:
        body = {"model": "tiny", "messages": messages}
        prompt = ChatDialect().parse_request(body).messages
        turn = graph.prepare_turn(trace, prompt, [])
        said = await client.get_response(
            ChatDialect(), body, SAMPLING, session_id=trace.id, turn=turn
        )
        turn.commit(said)
        reply = {"role": "assistant", "content": said.message.content or ""}
        if said.message.reasoning_content is not None:
            reply["reasoning_content"] = said.message.reasoning_content
        return reply

    history: list[dict] = [{"role": "user", "content": "What is 1+2?"}]
    for number in range(3):
        history += [
            await ask(history),
            {"role": "user", "content": f"And {number}?"},
        ]
    await ask([*history[:2], {"role": "user", "content": "Else?"}])
    await client.close()


def main() -> None:
    url, tokenizer, episode = sys.argv[1:]
    trace = Trace.model_construct(task=None, agent=None)
    name = trace.id if episode == "trace" else episode
    opened = httpx.post(f"{url}/episodes", json={"id": name, "seed": 5})
    opened.raise_for_status()
    base = url if episode == "trace" else f"{url}/episodes/{name}"
    asyncio.run(play(base, tokenizer, trace))
    branches = [
        {
            "token_ids": list(each.token_ids),
            "sampled": [bool(own) for own in each.sampled_mask],
            "logprobs": list(each.logprobs),
        }
        for each in trace.branches
    ]
    sys.stdout.write(json.dumps({"episode": name, "branches": branches}))


if __name__ == "__main__":
    main()
