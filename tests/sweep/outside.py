"""A tiny random checkpoint and its golden file as somebody else would make them: transformers and safetensors alone.

Nothing of Firstlight is imported here. Every weight is drawn anew from its name, so that two configurations with
parameters of the same names and shapes hold the same numbers: a key that changes the logits changes the mathematics.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

Tensors = dict[str, torch.Tensor]
KEPT = (
    "inv_freq",
    "position_ids",
    "rotary",
    "attn.bias",
    "masked_bias",
    "running_",
    "num_batches",
    "embed_positions",
    "_decay",
    "slope",
)

MOST = 4_000_000  # parameters of a tiny model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No remarks and no progress bars of transformers."""
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model_of(raw: Mapping[str, Any]) -> Any:
    """A float32 model of a raw configuration, every parameter drawn anew. Raises whatever transformers raises."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    with quiet():
        config = transformers.AutoConfig.for_model(**copy.deepcopy(dict(raw)))
        sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and "vision_config" in raw
        kind = auto.AutoModelForImageTextToText if sees else auto.AutoModelForCausalLM
        with torch.device("meta"):
            count = sum(value.numel() for value in kind.from_config(config).parameters())
        if count > MOST:
            raise ValueError(f"{count:,} parameters: its sizes have names that are not known here")
        torch.manual_seed(0)
        model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for module in model.modules():  # the plain loop over experts: the fused one asks for aligned widths
            own = getattr(module, "config", None)
            if own is not None and hasattr(own, "_experts_implementation"):
                own._experts_implementation = "eager"
        randomize(model)
        if type(model).__name__ == "Llama4ForConditionalGeneration":  # it asks its text's output for a field it lacks
            model.language_model.register_forward_hook(lambda _, __, out: setattr(out, "image_outputs", None))
    return model


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Matrices of gain about one; vectors away from what they are initialised to (ones, zeros, log of a range)."""
    persistent = model.state_dict(keep_vars=True).keys()
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name not in persistent and not isinstance(value, nn.Parameter):
            continue
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if not value.is_floating_point():
            if name.endswith("tid2eid"):
                experts = int(getattr(model.config, "n_routed_experts", 8))
                value.copy_(torch.rand(value.shape[0], experts, generator=draw).argsort(1)[:, : value.shape[1]])
            continue
        if any(word in name for word in KEPT):
            continue
        noise = torch.randn(value.shape, generator=draw)
        if id(value) in tables or "embed" in name or "lm_head.weight" in name:
            value.copy_(0.4 * noise)
        elif value.ndim <= 1 or value.numel() == max(value.shape):
            start = value if bool(torch.isfinite(value).all()) and float(value.abs().max()) < 20 else torch.zeros(())
            value.copy_(start + 0.3 * noise)
        else:
            value.copy_(noise * 1.2 / value.shape[-1] ** 0.5)


def prompts(vocab: int, tokens: int, seed: int = 0, taken: frozenset[int] = frozenset()) -> Tensors:
    """Three rows: whole, padded at the left, padded at the right; ids away from the special ones."""
    draw = np.random.default_rng(seed)
    allowed = np.array([i for i in range(3, vocab - 1) if i not in taken])
    ids = torch.from_numpy(draw.choice(allowed, (3, tokens)))
    mask = torch.ones_like(ids)
    mask[1, : tokens // 3] = 0
    mask[2, tokens - tokens // 4 :] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.inference_mode()
def run(model: Any, given: Tensors, steps: int = 0, positions: bool = True) -> Tensors:
    """What goes into a golden file; `positions`: rows that are padded at the left count from their first token."""
    more: dict[str, Any] = {}
    names = inspect.signature(model.forward).parameters
    config = model.config.to_dict()
    token = config.get("image_token_id") or config.get("image_token_index")
    if "pixel_values" in given:
        marks = (given["input_ids"] == token).long()
        more |= {name: marks for name in ("token_type_ids", "mm_token_type_ids") if name in names}
    elif positions and "position_ids" in names:
        more["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with quiet(), _first_input(model) as first:
        out = model(**given, **more, output_hidden_states=True, use_cache=False)
        found = {"logits": out.logits.float()}
        states = getattr(out, "hidden_states", None)
        count = model.config.get_text_config().num_hidden_layers
        if states is not None and len(states) == count + 1 and first:
            if not torch.equal(states[0], first[0]):  # some keep what comes out of layers, and not what goes in
                states = (first[0], *states[:-2], states[-1])
            found |= {f"hidden.{i}": state.float() for i, state in enumerate(states)}
        if "pixel_values" in given:
            found["image_features"] = _features(model, given)
        if steps:
            seeing = "pixel_values" in given
            found["generated"] = _together(model, {**given, **more}, steps) if seeing else _greedy(model, given, steps)
    return found


def _features(model: Any, given: Tensors) -> torch.Tensor:
    """Picture features behind the projector, in order: [n, hidden]."""
    found = model.get_image_features(**{n: t for n, t in given.items() if n not in ("input_ids", "attention_mask")})
    features = getattr(found, "pooler_output", found)
    if features is None:  # Llama 4 leaves the projector to the model's own forward
        features = model.multi_modal_projector(found.last_hidden_state)
    features = torch.cat(tuple(features)) if isinstance(features, list | tuple) else features
    return features.float().flatten(0, -2)


def _together(model: Any, given: Tensors, steps: int) -> torch.Tensor:
    """All rows at once, padded at the left."""
    out = model.generate(**given, max_new_tokens=steps, do_sample=False, num_beams=1, eos_token_id=None, pad_token_id=0)
    return out[:, given["input_ids"].shape[1] :][:, :steps]


@contextlib.contextmanager
def _first_input(model: Any) -> Iterator[list[torch.Tensor]]:
    """What goes into the first decoder layer, once the model has run; empty where no list of layers is found."""
    count, seen = model.config.get_text_config().num_hidden_layers, list[torch.Tensor]()
    lists = [m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count and "vis" not in n]

    def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append((given[0] if given else named["hidden_states"]).clone())

    hooks = [lists[0][0].register_forward_pre_hook(keep, with_kwargs=True)] if lists else []
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _greedy(model: Any, given: Tensors, steps: int) -> torch.Tensor:
    """Row by row without its padding; tokens that end an answer are not let through."""
    rows = []
    for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True):
        one = ids[mask.bool()][None]
        out = model.generate(
            one,
            attention_mask=torch.ones_like(one),
            max_new_tokens=steps,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows.append(out[0, one.shape[1] :][:steps])
    return torch.stack(rows)


def write(model: Any, home: Path, given: Tensors, found: Tensors, stored: torch.dtype = torch.float32) -> Path:
    """The checkpoint into `home`, the golden file beside it; the file's path."""
    with quiet():
        if stored != torch.float32:  # it would make real numbers of Llama 4's rotations
            model.to(stored)
        model.save_pretrained(home)
    return write_golden(home, given, found)


def write_golden(home: Path, given: Tensors, found: Tensors) -> Path:
    """The golden file beside a checkpoint; its path."""
    path = home.with_suffix(".golden.safetensors")
    save_file({name: value.contiguous().clone() for name, value in {**given, **found}.items()}, path)
    return path


def heeds_padding(model: Any, given: Tensors, found: Tensors) -> bool:
    """Whether a padded row gives what it gives alone; some references let their padding in."""
    for index, mask in enumerate(given["attention_mask"].bool()):
        ids = given["input_ids"][index : index + 1, mask]
        alone = run(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})["logits"][0]
        padded = found["logits"][index, mask]
        if float((alone - padded).abs().max()) > 1e-3 * float(alone.abs().max()):
            return False
    return True


def reopened(model: Any, home: Path) -> Any:
    """The checkpoint in `home` read back in float32, as its users would."""
    with quiet():
        return type(model).from_pretrained(home, dtype=torch.float32, attn_implementation="eager").eval()
