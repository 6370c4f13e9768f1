"""Which family serves which architecture. One line a family; a new one can be registered live. No torch."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.foreign import Foreign, ForeignSpec
from firstlight.engine.model.rules import Matcher, Part, WeightRule, under
from firstlight.engine.model.spec import ModelSpec

MODULES = (  # one line a family
    "apertus",
    "axk1",
    "bailing_hybrid",
    "bamba",
    "cohere",
    "cohere2_moe",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "ernie4_5_moe",
    "exaone4",
    "falcon_h1",
    "flex_olmo",
    "gemma",
    "gemma3",
    "gemma4",
    "glm",
    "glm4_moe",
    "glm4v",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "idefics3",
    "internvl",
    "jamba",
    "kimi_k25",
    "kimi_k3",
    "kimi_linear",
    "laguna",
    "lara_mini",
    "latent_kin",
    "lfm2",
    "lfm3",
    "llama",
    "llama4",
    "llama4_vision",
    "llama_kin",
    "llava",
    "llava_next",
    "longcat_flash",
    "mamba",
    "mamba2",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "mistral",
    "mistral3",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo_hybrid",
    "olmoe",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "recurrent_gemma",
    "sigmoid_kin",
    "stablelm",
    "starcoder2",
)


class Families(Mapping[str, Family]):
    """The families known to this process, by `model_type`."""

    def __init__(self, modules: tuple[str, ...] = MODULES) -> None:
        self._families: dict[str, Family] = {}
        for module in modules:
            self.register(importlib.import_module(f"firstlight.engine.model.families.{module}").FAMILY)
        self.foreign: Foreign | None = None

    def register(self, family: Family) -> Family:
        """Adds a family, or replaces one of the same model types (a draft that has grown)."""
        for model_type in family.model_types:
            self._families[model_type] = family
        return family

    def __getitem__(self, model_type: str) -> Family:
        return self._families[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)

    def of(self, config: Config, default: str | None = None) -> Family:
        """The family of a configuration; refused when nobody knows it, with the nearest name."""
        model_type = config.get("model_type", default) or config.need("model_type")
        if not isinstance(model_type, str):
            config.refuse("model_type", model_type, "a name")
        if model_type not in self._families:
            near = difflib.get_close_matches(str(model_type), self._families, n=3, cutoff=0.5)
            raise Refused(
                fatal(
                    "unknown-architecture",
                    f"no family answers to model_type {model_type!r} (architectures: {config.get('architectures')})",
                    file="config.json",
                    expected=", ".join(sorted(self._families)),
                    found=str(model_type),
                    next=(f"nearest names: {', '.join(near)}; " if near else "")
                    + "write a family file (engine/model/families) and register it",
                )
            )
        return self._families[model_type]

    def fall_back(self, provider: Foreign | None) -> None:
        """What no family knows is asked of `provider` from now on; None: it is refused."""
        self.foreign = provider

    def _from_elsewhere(self, raw: Mapping[str, Any]) -> ForeignSpec | None:
        if self.foreign is None or (raw.get("model_type") in self._families and not self.foreign.always):
            return None
        return self.foreign.describe(raw)

    def describe(self, raw: Mapping[str, Any]) -> tuple[ModelSpec, Matcher]:
        """The spec of a raw `config.json`, what was odd in it among its findings, and the matcher of tensor names.

        A `ForeignSpec`, and no rules, where another's modules compute.
        """
        if (foreign := self._from_elsewhere(raw)) is not None:
            return foreign, Matcher(())
        config = Config(raw)
        family = self.of(config)
        spec = self._spec(family, config)
        rules = self._rules(family, config)
        findings = list(config.all_findings())
        for key in config.unread():
            findings.append(
                warning(
                    "unread-config-key",
                    f"{key} is not read by family {family.name}",
                    file="config.json",
                    next="check that it does not change the mathematics; if it does, the family needs a block for it",
                )
            )
        if spec.layers and all(layer.rope is None for layer in spec.layers):
            findings.append(note("no-positions", "NoPE: no layer has a positional encoding"))
        spec = msgspec.structs.replace(spec, findings=spec.findings + tuple(findings))
        return spec, Matcher(rules)

    def _spec(self, family: Family, config: Config) -> ModelSpec:
        inner = [self._spec(*self._nested(part, config)) for part in family.parts]
        try:
            # Values go into the spec as they are written; to JSON and back checks the type of each.
            return msgspec.convert(msgspec.to_builtins(family.spec(config, *inner)), ModelSpec)
        except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError, OverflowError) as error:
            raise Refused(_unusable(family, config, error)) from error

    def _rules(self, family: Family, config: Config) -> tuple[WeightRule, ...]:
        rules = (family.left_out(config) if family.left_out else ()) + family.rules
        for part in family.parts:
            rules += under(part.prefix, self._rules(*self._nested(part, config)))
        return rules

    def _nested(self, part: Part, config: Config) -> tuple[Family, Config]:
        """The family of a part, and its configuration."""
        if part.flat and part.key not in config and part.default is not None:
            return self._families[part.default], config
        nested = config.sub(part.key)
        return self.of(nested, part.default), nested


def _unusable(family: Family, config: Config, error: Exception) -> Finding:
    """A value that no family can compute with, such as a text in place of a number."""
    latest = config.latest()
    read = f"{latest[0]} = {str(latest[1])[:60]!r} was read last" if latest else "nothing was read"
    return fatal(
        "config-invalid",
        f"{config.where}: family {family.name} cannot use a value: {error}; {read}",
        file="config.json",
        expected="values as the family's releases have them",
        found=read,
        next="fetch the release's own config.json again",
    )


FAMILIES = Families()


def register_family(family: Family) -> Family:
    """Makes a family known to this process; `firstlight.engine.register_family` in a notebook does this."""
    return FAMILIES.register(family)
