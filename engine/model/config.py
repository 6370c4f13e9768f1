"""Reads a model's raw `config.json` and remembers which keys were read, so that no key is silently ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, warning
from firstlight.engine.model.values import asks_for_numbers, impossible

# Keys that do not change the forward pass of inference: training, generation, bookkeeping.
HARMLESS = frozenset(
    """_name_or_path add_cross_attention architectures attention_dropout auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dropout dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout
    id2label ignore_index initializer_factor initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores
    pad_token_id prefix problem_type projection_dim pruned_heads remove_invalid_values repetition_penalty
    resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise seq_aux
    aux_loss_alpha sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
    use_cache pretraining_tp max_position_embeddings unsloth_version _attn_implementation
    _attn_implementation_autoset attn_implementation image_seq_length quantization_config tie_encoder_decoder
    residual_dropout embedding_dropout
    """.split()
)


_PLURAL = ("layers", "multipliers", "indices", "idxs", "indexes", "per_layer", "pattern")  # whose keys hold lists
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")  # names of one number


class Config:
    """One level of a configuration; `sub` opens a nested level. `unread()` lists keys nobody asked for.

    Values are those of the file: nothing is filled in except defaults that a family states when it reads.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where
        self._names: dict[str, str] = {}  # ours -> the file's, where it has an older one
        self._assumed: dict[str, Any] = {}  # what the architecture's own code takes where the file is silent
        self._read: dict[str, None] = {}  # in the order of the latest reading
        self._subs: dict[str, Config] = {}
        self.findings: list[Finding] = []

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def _note(self, key: str) -> None:
        self._read.pop(key, None)
        self._read[key] = None

    def latest(self) -> tuple[str, Any] | None:
        """The key that was read last and holds a value, and the value."""
        key = next((key for key in reversed(self._read) if self.raw.get(key) is not None), None)
        return None if key is None else (key, self.raw[key])

    def odd(self) -> tuple[str, ...]:
        """Keys that were read and have unusual values (zero, negative, lists, very large), latest first."""
        found = [key for key in reversed(self._read) if _is_odd(key, self.raw.get(key))]
        own = tuple(f"{self._named(key)} = {str(self.raw[key])[:60]}" for key in found)
        return own + tuple(name for sub in self._subs.values() for name in sub.odd())

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` when the key is absent or null."""
        self._note(key)
        value = self.raw.get(key)
        self._hold(key, value, default)
        return default if value is None else value

    def _hold(self, key: str, value: Any, default: Any) -> None:
        """Raises `Refused` for a value that cannot be what its key asks for."""
        if isinstance(value, str) and value.lower() in ("true", "false"):  # every text counts as true in Python
            self.refuse(key, value, "true or false, without quotes")
        assumed = self._assumed.get(key)
        if type(value) is type(assumed) and value == assumed:  # the architecture's own code computes with it
            return
        if (found := impossible(key, value, assumed if default is None else default)) is not None:
            self.refuse(*found)

    def stated(self, key: str, absent: Any) -> Any:
        """The value as written, null included; `absent` (the architecture's default) when the file is silent."""
        self._note(key)
        value = self.raw.get(key, absent)
        self._hold(key, value, absent)
        return value

    def assume(self, **values: Any) -> None:
        """Sets the architecture's own defaults for absent keys, as if the file contained them.

        A null counts as present. A number with several names counts as present under any of them.
        """
        if any(name in self.raw for name in SHARED_EXPERTS):
            values = {key: value for key, value in values.items() if key not in SHARED_EXPERTS}
        self._assumed.update(values)
        self._fill(values)

    def _fill(self, values: Mapping[str, Any]) -> None:
        """Sets values of absent keys, as if the file contained them."""
        for key in values.keys() - self.raw.keys():
            self._note(key)
        self.raw = {**values, **self.raw}

    def rename(self, names: Mapping[str, str]) -> None:
        """Reads keys with older names (ours -> theirs) under our names; messages still use the file's names."""
        there = {ours: theirs for ours, theirs in names.items() if theirs in self and ours not in self}
        self._names.update(there)
        for theirs in names.values():
            self._note(theirs)
        self._fill({ours: self.raw[theirs] for ours, theirs in there.items()})

    def _named(self, key: str) -> str:
        """The key as the file spells it."""
        return self._names.get(key, key)

    def need(self, *keys: str) -> Any:
        """The value of the first key that is present; refused when none is."""
        for key in keys:
            if key in self:
                return self.get(key)
        raise Refused(
            fatal(
                "config-invalid",
                f"{self.where} lacks the key {' or '.join(repr(key) for key in keys)}",
                file="config.json",
                expected=" or ".join(keys),
                found="absent",
                next="fetch the release's own config.json again; this value is not guessed",
            )
        )

    def size(self, *keys: str) -> int:
        """A positive whole number that must be there."""
        value, key = self.need(*keys), next(key for key in keys if key in self)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, value, "a positive whole number")
        for name in keys:  # the limit of any of its names
            if (found := impossible(name, value, 1)) is not None:
                self.refuse(key, value, found[2])
        return value

    def positive(self, key: str, value: Any) -> float:
        """`value`, which `key` holds, as a finite number above zero."""
        if isinstance(value, bool) or not 0 < float(value) < math.inf:
            self.refuse(key, value, "a finite number above zero")
        return float(value)

    def sub(self, key: str) -> Config:
        """The nested configuration under `key`; empty when absent."""
        self._note(key)
        if key not in self._subs:
            raw = self.raw.get(key)
            if raw is not None and not isinstance(raw, Mapping):
                self.refuse(key, raw, "an object")
            self._subs[key] = Config(raw or {}, f"{self.where}: {key}")
        return self._subs[key]

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The value, refused as an unsupported block when it is not one of `allowed`."""
        value = self.get(key, default)
        if value not in allowed:
            self.unsupported(key, value, " or ".join(repr(item) for item in allowed))
        return value

    def unsupported(self, key: str, value: Any, expected: str) -> None:
        raise Refused(
            fatal(
                "unsupported-block",
                f"{self.where}: {key} = {repr(value)[:200]} asks for mathematics that no block here has",
                file="config.json",
                expected=expected,
                found=repr(value),
                next="write the block and name it in the family file; the key is never passed over",
            )
        )

    def refuse(self, key: str, value: Any, expected: str) -> None:
        raise Refused(
            fatal(
                "config-invalid",
                f"{self.where}: {self._named(key)} has an impossible value",
                file="config.json",
                expected=expected,
                found=repr(value)[:200],
                next="fetch the release's own config.json again",
            )
        )

    def warn(self, code: str, message: str, **fields: object) -> None:
        found = warning(code, message, file="config.json", **fields)
        if found not in self.findings:  # layers read the same keys again
            self.findings.append(found)

    def unread(self) -> tuple[str, ...]:
        """Keys at this level and below that have a value, were never read and are not known to be harmless."""
        own = [
            f"{self.where}: {key}"
            for key, value in self.raw.items()
            if key not in self._read and key not in HARMLESS and not key.startswith("_") and value not in (None, {}, [])
        ]
        return tuple(own) + tuple(name for sub in self._subs.values() for name in sub.unread())

    def all_findings(self) -> tuple[Finding, ...]:
        return tuple(self.findings) + tuple(found for sub in self._subs.values() for found in sub.all_findings())


def _is_odd(key: str, value: object) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool) and not 0 < value < 1 << 31
    return isinstance(value, list) and asks_for_numbers(key) and not key.endswith(_PLURAL)
