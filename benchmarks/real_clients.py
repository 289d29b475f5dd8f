"""Other people's clients, each in a process of its own: AsyncOpenAI and litellm with a semaphore.

    python real_clients.py '{"client": "openai", "url": ..., "limit": 16, "prompts": [...], ...}'

prints the seconds of all calls together, without those of the client's import, and the seconds of
each, null for a lost one, as JSON. It imports nothing of batchwright, so that it also runs in an
environment that has only the peer.
"""

import asyncio
import json
import sys
import time
from typing import Any


async def main(given: dict[str, Any]) -> dict[str, Any]:
    gate = asyncio.Semaphore(given["limit"])
    settings = {"max_tokens": given["max_tokens"], "temperature": 0}
    if given["client"] == "openai":
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=given["url"], api_key="none", timeout=given["deadline_s"])

        def call(messages: Any) -> Any:
            return client.chat.completions.create(
                model=given["model"], messages=messages, **settings
            )

    else:
        import litellm

        def call(messages: Any) -> Any:
            return litellm.acompletion(
                model=f"openai/{given['model']}",
                api_base=given["url"],
                api_key="none",
                timeout=given["deadline_s"],
                num_retries=2,
                messages=messages,
                **settings,
            )

    async def one(prompt: str) -> float | None:
        async with gate:
            begun = time.perf_counter()
            try:
                await call([{"role": "user", "content": prompt}])
            except Exception:
                return None
            return time.perf_counter() - begun

    begun = time.perf_counter()
    took = await asyncio.gather(*map(one, given["prompts"]))
    return {"seconds": time.perf_counter() - begun, "took": took}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))))
