"""Which family serves which architecture. One line a family; a new one can be registered live. No torch."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, warning
from firstlight.engine.model.config import Config
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.foreign import Foreign, ForeignSpec
from firstlight.engine.model.rules import Matcher, Part, WeightRule, under
from firstlight.engine.model.spec import ModelSpec

_CLASS = re.compile(r"(\w+?)(ForCausalLM|ForConditionalGeneration|LMHeadModel)")
HOMES: Mapping[str, str] = MappingProxyType(
    {  # one line a family: its file, and the model types that it answers to
        "apertus": "apertus",
        "axk1": "axk1",
        "bailing_hybrid": "bailing_hybrid",
        "bailing_moe_v2": "bailing_moe_v2 bailing_moe",
        "bamba": "bamba",
        "cohere": "cohere cohere2",
        "cohere2_moe": "cohere2_moe",
        "cohere_vision": "aya_vision cohere2_vision",
        "dbrx": "dbrx",
        "deepseek_v2": "deepseek_v2",
        "deepseek_v3": "deepseek_v3 kimi_k2",
        "deepseek_v32": "deepseek_v32 glm_moe_dsa",
        "deepseek_v4": "deepseek_v4",
        "ernie4_5_moe": "ernie4_5_moe",
        "exaone": "exaone iquestcoder",
        "exaone4": "exaone4",
        "falcon_h1": "falcon_h1",
        "flex_olmo": "flex_olmo",
        "flint": "flint",
        "gemma": "gemma gemma2 gemma3_text vaultgemma",
        "gemma3": "gemma3",
        "gemma4": "gemma4_text",
        "glm": "glm glm4 glm4v_text",
        "glm4_moe": "glm4_moe glm4v_moe_text",
        "glm4v": "glm4v glm4v_moe glm46v",
        "gpt2": "gpt2",
        "gpt_bigcode": "gpt_bigcode",
        "gpt_neox": "gpt_neox falcon bloom",
        "gpt_oss": "gpt_oss",
        "gptj": "gptj",
        "granite_swa": "granite_swa granitemoe_swa hyperclovax",
        "granitemoe": "granitemoe granitemoeshared",
        "granitemoehybrid": "granitemoehybrid",
        "hunyuan_v1_dense": "hunyuan_v1_dense",
        "hunyuan_v1_moe": "hunyuan_v1_moe",
        "idefics3": "idefics3 smolvlm",
        "internvl": "internvl",
        "jais2": "jais2",
        "jamba": "jamba",
        "kimi_k25": "kimi_k25 kimi_vl",
        "kimi_k3": "kimi_k3",
        "kimi_linear": "kimi_linear",
        "laguna": "laguna",
        "lara_mini": "lara_mini",
        "latent_kin": "glm4_moe_lite minicpm3 mistral4 youtu",
        "lfm2": "lfm2 lfm2_moe",
        "lfm3": "lfm3",
        "llama": "llama",
        "llama4": "llama4_text",
        "llama4_vision": "llama4",
        "llama_kin": "arcee cwm ernie4_5 granite helium internlm3 ministral ministral3 seed_oss smollm3",
        "llava": "llava",
        "llava_next": "llava_next",
        "longcat_flash": "longcat_flash",
        "mamba": "mamba falcon_mamba",
        "mamba2": "mamba2",
        "mellum": "mellum",
        "mimo_v2_flash": "mimo_v2_flash",
        "minimax": "minimax",
        "minimax_m2": "minimax_m2",
        "minimax_m3": "minimax_m3_vl_text",
        "minimax_m3_vl": "minimax_m3_vl minimax_m3",
        "mistral": "mistral",
        "mistral3": "mistral3",
        "mixtral": "mixtral",
        "mpt": "mpt",
        "nemotron": "nemotron",
        "nemotron_h": "nemotron_h",
        "olmo": "olmo olmo2 olmo3",
        "olmo_hybrid": "olmo_hybrid",
        "olmoe": "olmoe",
        "persimmon": "persimmon",
        "phi": "phi",
        "phi3": "phi3",
        "phimoe": "phimoe",
        "qwen2": "qwen2 qwen2_vl_text qwen2_5_vl_text",
        "qwen2_moe": "qwen2_moe",
        "qwen2_vl": "qwen2_vl qwen2_5_vl",
        "qwen3": "qwen3 qwen3_vl_text",
        "qwen3_5": "qwen3_5_text qwen3_5_moe_text",
        "qwen3_moe": "qwen3_moe qwen3_vl_moe_text",
        "qwen3_next": "qwen3_next",
        "qwen3_vl": "qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe",
        "recurrent_gemma": "recurrent_gemma",
        "sarvam": "sarvam_moe sarvam_mla",
        "sigmoid_kin": "afmoe dots1 exaone_moe hy_v3 kolibri1 solar_open",
        "stablelm": "stablelm",
        "starcoder2": "starcoder2",
        "vipllava": "vipllava",
    }
)


class Families(Mapping[str, Family]):
    """The families known to this process, by `model_type`; a family's file is imported when it is first asked for."""

    def __init__(self, homes: Mapping[str, str] = HOMES) -> None:
        self._homes = {model_type: module for module, types in homes.items() for model_type in types.split()}
        self._families: dict[str, Family] = {}
        self.foreign: Foreign | None = None

    def register(self, family: Family) -> Family:
        """Adds a family, or replaces one of the same model types (a draft that has grown)."""
        for model_type in family.model_types:
            self._families[model_type] = family
        return family

    def __getitem__(self, model_type: str) -> Family:
        if model_type not in self._families:
            module = importlib.import_module(f"firstlight.engine.model.families.{self._homes[model_type]}")
            self._families = {**dict.fromkeys(module.FAMILY.model_types, module.FAMILY), **self._families}
        return self._families[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes | self._families)

    def __len__(self) -> int:
        return len(self._homes | self._families)

    def __contains__(self, model_type: object) -> bool:
        return isinstance(model_type, str) and (model_type in self._families or model_type in self._homes)

    def of(self, config: Config, default: str | None = None) -> Family:
        """The family of a configuration; refused when nobody knows it, with the nearest name."""
        model_type = config.get("model_type", default) or config.need("model_type")
        if not isinstance(model_type, str):
            config.refuse("model_type", model_type, "a name")
        if model_type not in self:
            near = difflib.get_close_matches(model_type.lower()[:60], self, n=3, cutoff=0.5)
            raise Refused(
                fatal(
                    "unknown-architecture",
                    f"no family supports model_type {model_type!r} (architectures: {config.get('architectures')})",
                    file="config.json",
                    expected=", ".join(sorted(self)),
                    found=str(model_type),
                    next=(f"nearest names: {', '.join(near)}; " if near else "")
                    + "firstlight scan DIR --propose FILE drafts a family file, to be finished and registered",
                )
            )
        return self[model_type]

    def _name(self, config: Config) -> None:
        """A configuration that names its architecture's class alone has the model type of it, which is told."""
        name, found = self._of_class(config)
        if found is None:
            return
        config.assume(model_type=found)
        config.warn(
            "config-invalid",
            f"{config.where} names no model_type; its class {name} is read as {found}",
            expected="model_type",
            found="absent",
            next="state model_type in config.json",
        )

    def _of_class(self, config: Config) -> tuple[str, str | None]:
        """The class that a configuration names, and the model type that a class of this name has, if one is known."""
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        whole = _CLASS.fullmatch(name)
        if whole is None:
            return name, None
        plain = {model_type.replace("_", ""): model_type for model_type in self}
        short, kind = whole[1].replace("_", "").lower(), whole[2]
        return name, (plain.get(f"{short}text") if kind == "ForCausalLM" else None) or plain.get(short)

    def _hold_class(self, family: Family, config: Config) -> None:
        """Engines that go by the class, and those that go by the model type, must compute the same."""
        name, other = self._of_class(config)
        if family.classes.get(str(config.raw.get("model_type"))) == name:
            return  # as transformers itself writes it, which reads the model type
        if other is not None and self[other].name != family.name and other not in family.model_types:
            config.warn(
                "conflicting-flag",
                f"{config.where} calls itself {config.raw['model_type']} and its class {name}, which is {other}; "
                "model_type decides",
                expected=f"model_type = {other}, or a class of {config.raw['model_type']}",
                found=f"architectures: {name}",
                next="check both against the release: engines that go by the class compute another architecture",
            )

    def fall_back(self, provider: Foreign | None) -> None:
        """What no family knows is asked of `provider` from now on; None: it is refused."""
        self.foreign = provider

    def _from_elsewhere(self, raw: Mapping[str, Any]) -> ForeignSpec | None:
        if self.foreign is None or (raw.get("model_type") in self and not self.foreign.always):
            return None
        return self.foreign.describe(raw)

    def describe(self, raw: Mapping[str, Any]) -> tuple[ModelSpec, Matcher]:
        """The spec of a raw `config.json`, what was odd in it among its findings, and the matcher of tensor names.

        A `ForeignSpec`, and no rules, where another's modules compute.
        """
        config = Config(raw)
        if "model_type" not in config:
            self._name(config)
        elif not isinstance(config.raw["model_type"], str):
            config.refuse("model_type", config.raw["model_type"], "a name")
        if (foreign := self._from_elsewhere(config.raw)) is not None:
            return foreign, Matcher(())
        family = self.of(config)
        self._hold_class(family, config)
        spec = self._spec(family, config)
        rules = self._rules(family, config)
        findings = list(config.all_findings())
        for key in config.unread():
            findings.append(
                warning(
                    "unread-config-key",
                    f"{key} is not read by family {family.name}",
                    file="config.json",
                    expected=f"keys that family {family.name} reads",
                    found=key,
                    next="check that it does not change the mathematics; if it does, the family needs a block for it",
                )
            )
        if spec.layers and not spec.learned_positions and not any(layer.knows_positions for layer in spec.layers):
            findings.append(note("no-positions", "NoPE: no layer has a positional encoding"))
        spec = msgspec.structs.replace(spec, findings=spec.findings + tuple(findings))
        return spec, Matcher(rules)

    def _spec(self, family: Family, config: Config) -> ModelSpec:
        config.assume(**family.silent.get(str(config.raw.get("model_type")), {}))
        inner = [self._spec(*self._nested(part, config)) for part in family.parts]
        try:
            # Values go into the spec as they are written; to JSON and back checks the type of each.
            spec = msgspec.convert(msgspec.to_builtins(family.spec(config, *inner)), ModelSpec)
        except (TypeError, ValueError, AttributeError, LookupError, ZeroDivisionError, OverflowError) as error:
            raise Refused(_unusable(family, config, error)) from error
        if any(getattr(layer.mixer, "window", None) == 0 for layer in spec.layers):
            config.refuse("sliding_window", 0, "a positive whole number, or null: nothing is seen through no window")
        return spec

    def _rules(self, family: Family, config: Config) -> tuple[WeightRule, ...]:
        rules = (family.left_out(config) if family.left_out else ()) + family.rules
        for part in family.parts:
            rules += under(part.prefix, self._rules(*self._nested(part, config)))
        return rules

    def _nested(self, part: Part, config: Config) -> tuple[Family, Config]:
        """The family of a part, and its configuration."""
        if part.flat and part.key not in config and part.default is not None:
            return self[part.default], config
        nested = config.sub(part.key)
        if part.default is not None:
            nested.assume(model_type=part.default)
        return self.of(nested), nested


def _unusable(family: Family, config: Config, error: Exception) -> Finding:
    """A value that no family can compute with, such as a text in place of a number."""
    latest, odd = config.latest(), config.odd()
    read = f"{latest[0]} = {str(latest[1])[:60]!r} was read last" if latest else "nothing was read"
    if odd:
        read = f"{', '.join(odd[:3])} {'was' if len(odd) == 1 else 'were'} read"
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
