"""An SGLang engine: commands come as lines of JSON on its input, answers go to its output."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Child:
    """Obeys.

    Args:
        options: Arguments of `sglang.Engine`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.engine = Engine(**options)

    def generate(self, asks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answer all of them, scheduled together."""
        begin = time.monotonic()
        answers = self.engine.generate(
            input_ids=[list(ask["tokens"]) for ask in asks],
            sampling_params=[_sampling(ask) for ask in asks],
            **_of_all(asks),
        )
        took_s = time.monotonic() - begin
        return [_plain(answer, took_s) for answer in answers]

    def first_token(self, ask: Mapping[str, Any]) -> float:
        """Seconds until the first token of an answer."""
        begin = time.monotonic()
        tokens = self.engine.generate(
            input_ids=list(ask["tokens"]), sampling_params=_sampling(ask), stream=True
        )
        next(iter(tokens))
        took_s = time.monotonic() - begin
        for _ in tokens:
            pass
        return took_s

    def update_weights(self, path: str) -> bool:
        """Replace the weights, without flushing the cache."""
        flush = {"flush_cache": False}
        request = self.engine.tokenizer_manager.update_weights_from_disk
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        asked = UpdateWeightFromDiskReqInput(model_path=path, **flush)
        return bool(self.engine.loop.run_until_complete(request(asked, None))[0])

    def burst(self, asks: Sequence[Mapping[str, Any]], num_aborted: int) -> list[Any]:
        """Answer all of them at once, while clients of some give up; None for theirs."""
        dice = random.Random(len(asks))
        aborted = set(dice.sample(range(len(asks)), num_aborted))

        async def one(number: int, ask: Mapping[str, Any]) -> Any:
            begin, name = time.monotonic(), f"burst-{begin_s}-{number:04}"
            last: Mapping[str, Any] = {}
            stream = await self.engine.async_generate(
                input_ids=list(ask["tokens"]),
                sampling_params=_sampling(ask),
                stream=True,
                rid=name,
            )
            give_up_s = dice.random()
            async for answer in stream:
                last = answer
                if number in aborted and time.monotonic() - begin > give_up_s:
                    self.engine.tokenizer_manager.abort_request(rid=name)
            return None if number in aborted else _plain(last, time.monotonic() - begin)

        begin_s = time.monotonic()

        async def everything() -> list[Any]:
            return list(await asyncio.gather(*(one(i, ask) for i, ask in enumerate(asks))))

        return self.engine.loop.run_until_complete(everything())


def _of_all(asks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    salts = [ask.get("salt") or None for ask in asks]
    adapters = [ask.get("adapter") or None for ask in asks]
    named: dict[str, Any] = {"cache_salt": salts} if any(salts) else {}
    return named | ({"lora_path": adapters} if any(adapters) else {})


def _sampling(ask: Mapping[str, Any]) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": ask["num_new"], "ignore_eos": True}


def _plain(answer: Mapping[str, Any], took_s: float) -> dict[str, Any]:
    about = answer["meta_info"]
    reason = about["finish_reason"] or {}
    return {
        "tokens": answer["output_ids"],
        "logprobs": [],
        "num_cached": about.get("cached_tokens", 0),
        "finish_reason": str(reason.get("type")) + str(reason.get("message") or ""),
        "took_s": took_s,
        "prompt_logprobs": [],
    }


def main() -> None:
    """Obey until the input ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is for the log
    child: Child | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        command.pop("name", None)
        answer: Any = None
        if do == "open":
            child = Child(command["options"])
        else:
            assert child is not None, "open it first"
            answer = getattr(child, do)(**command)
        print(json.dumps({"answer": answer}), file=output, flush=True)
    if child is not None:
        child.engine.shutdown()


if __name__ == "__main__":
    main()
