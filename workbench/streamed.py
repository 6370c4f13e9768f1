"""The reference one layer at a time, for models that do not fit: transformers' modules, each loaded, run and dropped.

Every decoder layer becomes a model of one layer whose configuration says of it what the whole says of that layer. The
first one brings embedding and vision tower, the last one norm and head. Memory: one layer in float32, and the states.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.room import available_bytes
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.sources.mirror import complete
from firstlight.engine.weights.unpacked import Unpacked
from firstlight.workbench.reference import (
    DTYPES,
    Arrays,
    Reference,
    SplitSums,
    behind_mixer,
    decoder_layers,
    entering,
    features_of,
    load_transformers,
    one_stream,
    pictures_of,
    quiet,
    refuse_random,
    replace_input,
    without_quantization,
)

MEMORY_SHARE = 0.5  # of what is available, that a whole reference may take
TEXT_LAYER = re.compile(r"^(?!.*vision).*?(?:layers|blocks)\.(\d+)\.")  # blocks: Kimi K2.5 as transformers saves it
TEXT_PREFIX = re.compile(r"^((model\.)?(language_model|text_model)\.(model\.)?|model\.)?")


def _is_dense(config: Any, index: int) -> bool:
    return index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step != 0


# What a model of layer i alone must say where kinds of layers alternate other than by `layer_types`, by model type.
ONE_LAYER: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "deepseek_v3": lambda config, i: {"first_k_dense_replace": int(i < config.first_k_dense_replace)},
    "kimi_linear": lambda config, i: {"mlp_layer_types": [config.mlp_layer_types[i]]},
    **dict.fromkeys(
        ("qwen3_moe", "qwen3_next"),
        lambda config, i: {"decoder_sparse_step": 1, "mlp_only_layers": [0] if _is_dense(config, i) else []},
    ),
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text"), lambda config, i: {}),
    **dict.fromkeys(("gemma2", "llama", "mistral", "mixtral", "qwen2", "qwen3"), lambda config, i: {}),
}


class StreamedReference:
    """Gives what `Reference` gives, without generated tokens."""

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: str, version: str) -> None:
        self.version = version
        self._checkpoint = checkpoint
        self._weights = Unpacked(checkpoint)
        self._config = config
        self._text = config.get_text_config()
        self._dtype = dtype
        self._first: Any = None

    @classmethod
    def open(cls, directory: str | Path, *, dtype: str = "F32") -> StreamedReference:
        """Raises `Refused` (not-available) for a model type whose layers cannot be told apart here."""
        transformers = load_transformers()
        with quiet():
            config = without_quantization(transformers.AutoConfig.from_pretrained(directory, local_files_only=True))
        text = config.get_text_config()
        kind, by_grid = text.model_type, "mrope_section" in (getattr(text, "rope_parameters", None) or {})
        if kind not in ONE_LAYER or (by_grid and hasattr(config, "vision_config")):  # positions need the whole prompt
            raise Refused(
                fatal(
                    "not-available",
                    f"the reference of model type {config.model_type} cannot be run layer by layer",
                    file=str(directory),
                    expected=f"a text of {', '.join(sorted(ONE_LAYER))}, pictures placed like text",
                    found=f"{kind}, positions by the grids of pictures" if by_grid else kind,
                    next="run it whole where it fits, or verify against a golden file (--golden)",
                )
            )
        return cls(Checkpoint.open(directory), config, dtype, transformers.__version__)

    def run(self, inputs: Mapping[str, NDArray[Any]], generate: int = 0) -> Arrays:
        """`hidden.0` ... `hidden.L`, `logits` and, with pictures, `image_features`; nothing is generated."""
        return self._walk(inputs, None)

    def again(self, inputs: Mapping[str, NDArray[Any]], forced: Mapping[str, NDArray[Any]] | None = None) -> Arrays:
        """`run`, or `forced`, with every matrix product summed in two halves."""
        with SplitSums():
            return self._walk(inputs, forced)

    def forced(self, inputs: Mapping[str, NDArray[Any]], given: Mapping[str, NDArray[Any]]) -> Arrays:
        """`run` with each decoder layer starting from `hidden.i` of `given`."""
        return self._walk(inputs, given)

    def mixer(self, index: int, inputs: Mapping[str, NDArray[Any]], given: NDArray[Any]) -> NDArray[Any] | None:
        """What layer `index` adds to the residual stream before its feed-forward, for `given` as its input."""
        tensors = _tensors(inputs)
        kept: list[Tensor] = []
        with torch.inference_mode(), quiet():
            model = self._part(index)
            layer = decoder_layers(model)[0]
            source = behind_mixer(layer)
            if source is None:
                return None
            source.register_forward_hook(lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out))
            self._run_part(model, index, tensors, torch.from_numpy(given))
        return kept[0].float().numpy()

    def embed(self, ids_T: NDArray[Any], positions_T: NDArray[Any] | None = None) -> NDArray[Any]:
        """What enters the first layer for tokens that stand alone, [tokens, width]; that layer is loaded once more."""
        if self._first is None:
            with quiet():
                self._first = self._part(0)
        return entering(self._first, ids_T, positions_T)

    def _walk(self, inputs: Mapping[str, NDArray[Any]], forced: Mapping[str, NDArray[Any]] | None) -> Arrays:
        tensors, found = _tensors(inputs), {}
        last = self._text.num_hidden_layers - 1
        state: Tensor | None = None
        with torch.inference_mode(), quiet():
            for index in range(last + 1):
                model = self._part(index)
                given = state if forced is None else torch.from_numpy(forced[f"hidden.{index}"])
                state, out = self._run_part(model, index, tensors, given)
                if index == 0:
                    found["hidden.0"] = one_stream(out.hidden_states[0]).float().numpy()
                    if len(pictures := pictures_of(tensors)):
                        found["image_features"] = features_of(model, pictures)
                shown = out.hidden_states[-1] if index == last else state
                found[f"hidden.{index + 1}"] = one_stream(shown).float().numpy()
                if index == last:
                    found["logits"] = out.logits.float().numpy()
                    found["unnormed"] = one_stream(state).float().numpy()
        return found

    def _run_part(
        self, model: Any, index: int, tensors: Mapping[str, Tensor], given: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The output of the one layer, before any norm, and of the model around it."""
        kept: list[Tensor] = []
        layer = decoder_layers(model)[0]
        with contextlib.ExitStack() as hooks:
            if given is not None:
                hooks.callback(layer.register_forward_pre_hook(replace_input(given), with_kwargs=True).remove)
            keep = layer.register_forward_hook(
                lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
            )
            hooks.callback(keep.remove)
            fed = dict(tensors)
            if index:
                beside = {name: tensors[name] for name in ("attention_mask", "position_ids") if name in tensors}
                assert given is not None
                fed = {"inputs_embeds": given.to(model.dtype), **beside}
            out = model(**fed, output_hidden_states=True, use_cache=False)
        return kept[0], out

    def _part(self, index: int) -> Any:
        """The model of layer `index` alone, with what stands before the first and behind the last."""
        transformers = load_transformers()
        whole, last = index == 0, index == self._text.num_hidden_layers - 1
        config = copy.deepcopy(self._config if whole else self._text)
        text = config.get_text_config()
        for key, value in ONE_LAYER[text.model_type](self._text, index).items():
            setattr(text, key, value)
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[index]]
        text.num_hidden_layers = 1
        sees = whole and hasattr(config, "vision_config")
        if hasattr(self._config, "vision_config") and hasattr(text, "final_logit_softcapping"):
            text.final_logit_softcapping = None  # models that see have a plain output head
        mapping = (
            transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        )
        tensors = {self._renamed(name, sees): name for name in self._names(index, whole, last)}
        model, info = mapping[type(config)].from_pretrained(
            None,
            config=config,
            state_dict={ours: self._weights.read(name) for ours, name in tensors.items()},
            dtype=DTYPES[self._dtype],
            output_loading_info=True,
            experts_implementation="eager",
        )
        refuse_random(self._checkpoint.directory, info, lambda name: _is_elsewhere(name, whole, last))
        return model.eval()

    def _names(self, index: int, first: bool, last: bool) -> Iterator[str]:
        """The checkpoint's names that belong to a part; a tied head is the embedding."""
        has_head = any(name.endswith("lm_head.weight") for name in self._weights.names)
        for name in self._weights.names:
            match = TEXT_LAYER.match(name)
            if match:
                if int(match[1]) == index:
                    yield name
            elif name.endswith("embed_tokens.weight"):
                if first or (last and not has_head):
                    yield name
            elif name.endswith("lm_head.weight") or re.search(r"(^|model\.)norm\.weight$", name):
                if last:
                    yield name
            elif first:
                yield name

    def _renamed(self, name: str, sees: bool) -> str:
        """Layer i becomes layer 0; in a part for text alone the names lose the prefix of a composite model."""
        if TEXT_LAYER.match(name):
            name = re.sub(r"(layers|blocks)\.\d+\.", r"\1.0.", name, count=1)
        if sees:
            return name
        plain = TEXT_PREFIX.sub("", name).replace("blocks.0.", "layers.0.", 1)
        return plain if plain.startswith("lm_head") else f"model.{plain}"


AnyReference = Reference | StreamedReference


def open_reference(
    checkpoint: Checkpoint, dtype: str = "F32", *, streamed: bool | None = None, trust_remote_code: bool = False
) -> AnyReference:
    """The reference whole or, `streamed`, layer by layer; None: layer by layer if it would fill most of the memory."""
    if streamed is None:
        needed_bytes = Unpacked(checkpoint).elements * DTYPES[dtype].itemsize
        streamed = needed_bytes > MEMORY_SHARE * (available_bytes() or 0)
    if streamed:
        return StreamedReference.open(checkpoint.directory, dtype=dtype)
    complete(Path(checkpoint.directory))
    return Reference.open(checkpoint.directory, dtype=dtype, trust_remote_code=trust_remote_code)


def _is_elsewhere(name: str, first: bool, last: bool) -> bool:
    """Whether another part holds a parameter that this one lacks."""
    if name.endswith("embed_tokens.weight"):
        return not first
    if name.endswith("lm_head.weight") or re.search(r"(^|model\.)norm\.weight$", name):
        return not last
    return False


def _tensors(inputs: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
