"""Reports what generation_config.json asks for that this engine does not do by default. No torch.

The vendor's `generate` takes these values for its own wherever a call does not say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from firstlight.engine.findings import Finding, note, warning
from firstlight.engine.inputs import side_files

# Keys that change which tokens come, and the values besides None with which they ask for nothing.
CHANGES: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
# Keys of sampling: the values with which they ask for nothing, and the option that does the same here.
SAMPLING: dict[str, tuple[tuple[Any, ...], str]] = {
    "temperature": ((1,), "temperature"),
    "top_p": ((1,), "top_p"),
    "top_k": ((0,), "top_k"),
    "min_p": ((0,), ""),
    "top_h": ((1,), ""),
    "typical_p": ((1,), ""),
    "epsilon_cutoff": ((0,), ""),
    "eta_cutoff": ((0,), ""),
}
SHOWN_CHARACTERS = 60


def unmet(generation: Mapping[str, Any]) -> Iterator[Finding]:
    """A warning for settings that change greedy decoding, a note for the vendor's sampling defaults."""
    asked = [_said(key, generation[key]) for key in CHANGES if _asks(generation.get(key), CHANGES[key])]
    if asked:
        yield warning(
            "generation-default",
            f"{side_files.GENERATION_CONFIG} asks for {', '.join(asked)}, which is not supported here",
            file=side_files.GENERATION_CONFIG,
            expected="the model's own distribution",
            found=", ".join(asked),
            next="expect other tokens than the vendor's `generate` gives",
        )
    if generation.get("do_sample") is not True:
        return
    wanted = {key: generation[key] for key, (neutral, _) in SAMPLING.items() if _asks(generation.get(key), neutral)}
    if wanted:
        values = ", ".join(_said(key, value) for key, value in wanted.items())
        absent = ", ".join(key for key in wanted if not SAMPLING[key][1])
        yield note(
            "generation-default",
            f"the vendor samples with {values} by default; here requests must ask for it",
            file=side_files.GENERATION_CONFIG,
            expected="values that requests give",
            found=values,
            next="give them with requests" + (f"; {absent} cannot be given here" if absent else ""),
        )


def _asks(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is not None and value not in neutral


def _said(key: str, value: Any) -> str:
    text = f"{key} {value}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
