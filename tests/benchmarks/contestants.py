"""Firstlight and its peers behind one face: prefill a prompt, decode a batch. Figures are taken from inside a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch


class Contestant(Protocol):
    """One engine with one model loaded."""

    name: str

    def decode_rate(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        """Tokens per second of all sequences together, from the first token of each on."""

    def prefill_s(self, prompt_tokens: int) -> float:
        """Seconds from a prompt to its first token."""


def prompt_ids(index: int, tokens: int, vocab_size: int) -> list[int]:
    """A prompt of ids from the middle of the vocabulary, not equal in all sequences."""
    first, count = vocab_size // 10, vocab_size // 2
    return [first + (index * 7919 + position * 104_729) % count for position in range(tokens)]


class Firstlight:
    """This project's engine in this process."""

    name = "firstlight"

    def __init__(self, checkpoint: Path, max_batch: int, max_context: int, **options: Any) -> None:
        from firstlight.engine.serving.runtime import Engine

        self.engine = Engine.start(str(checkpoint), max_batch=max_batch, max_context=max_context, **options)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        return self.engine.worker.rank.weights.nbytes

    def decode_rate(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        streams = [self._submit(index, prompt_tokens, new_tokens) for index in range(batch)]
        counts = [0] * batch
        started_s, started_tokens = 0.0, 0
        while max(counts) < new_tokens:
            assert self.engine.step()
            for index, stream in enumerate(streams):
                while (delta := stream.read(0)) is not None:
                    counts[index] += len(delta.tokens)
            if min(counts) and not started_s:
                started_s, started_tokens = time.perf_counter(), sum(counts)
        rate = (sum(counts) - started_tokens) / (time.perf_counter() - started_s)
        while self.engine.step():
            pass
        return rate

    def prefill_s(self, prompt_tokens: int) -> float:
        started_s = time.perf_counter()
        self._submit(0, prompt_tokens, 1)
        while self.engine.step():
            pass
        return time.perf_counter() - started_s

    def _submit(self, index: int, prompt_tokens: int, new_tokens: int) -> Any:
        from firstlight.engine.serving.request import SamplingParams

        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        vocab_size = self.engine.worker.rank.spec.vocab_size
        return self.engine.submit(prompt_ids(index, prompt_tokens, vocab_size), params=params, chat=False)


class Transformers:
    """transformers' eager `generate`, greedy, with its default attention (sdpa)."""

    name = "transformers"

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.bfloat16).eval()

    def decode_rate(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        times = self._generate(batch, prompt_tokens, new_tokens)
        return batch * (len(times) - 1) / (times[-1] - times[0])

    def prefill_s(self, prompt_tokens: int) -> float:
        started_s = time.perf_counter()
        return self._generate(1, prompt_tokens, 1)[0] - started_s

    def _generate(self, batch: int, prompt_tokens: int, new_tokens: int) -> list[float]:
        """When each step had its tokens."""
        vocab_size = self.model.config.vocab_size
        ids = torch.tensor([prompt_ids(index, prompt_tokens, vocab_size) for index in range(batch)])
        times: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=[note_time],
            )
        assert len(times) == new_tokens, (len(times), new_tokens)
        return times
