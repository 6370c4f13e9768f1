"""The reference implementation, by transformers: what a release's own authors run. The only file that imports it.

Everything is computed in float32 on the CPU from local files; nothing is downloaded and no remote code runs unless
asked. `run` gives what a golden file holds; `again` the same with every sum split in two, which measures the noise that
another order of summation makes: the floor under every comparison.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.unpacked import Unpacked
from firstlight.workbench.mends import forget_lengths, mend, refill, sharpen

Arrays = dict[str, NDArray[Any]]
TYPE_NAMES = ("mm_token_type_ids", "token_type_ids")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Reference:
    """A checkpoint loaded whole by transformers, in float32."""

    def __init__(self, model: Any, version: str, info: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self.version = version
        self.info = info or {}

    @property
    def model(self) -> Any:
        """transformers' own module."""
        return self._model

    def with_types(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with the marks of picture tokens, where the model asks for them beside pictures."""
        return _with_types(self._model, tensors)

    @classmethod
    def open(cls, directory: str | Path, *, dtype: str = "F32", trust_remote_code: bool = False) -> Reference:
        """Load the checkpoint in `directory`; `dtype` other than F32 is for measuring what its rounding does.

        Raises `Refused`: not-available without transformers or for an architecture it does not know, missing-tensor
        when it would fill a parameter with random numbers (transformers itself reports success then).
        """
        transformers = load_transformers()
        with quiet():
            try:
                config = transformers.AutoConfig.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=trust_remote_code
                )
                pictures = hasattr(config, "vision_config")
                kind = transformers.AutoModelForImageTextToText if pictures else transformers.AutoModelForCausalLM
                unpacked = None if trust_remote_code else _unpacked(directory)
                model, info = (kind if unpacked is None else kind._model_mapping[type(config)]).from_pretrained(
                    directory if unpacked is None else None,
                    dtype=DTYPES[dtype],
                    output_loading_info=True,
                    experts_implementation="eager",  # the plain loop: the fused one asks for aligned widths
                    **({"config": without_quantization(config), "state_dict": unpacked} if unpacked else {}),
                    **({} if unpacked else {"local_files_only": True, "trust_remote_code": trust_remote_code}),
                )
            except (ValueError, KeyError, OSError) as error:
                raise unavailable(directory, str(error).splitlines()[0]) from error
            except RuntimeError as error:
                if "ignore_mismatched_sizes" not in str(error):
                    raise
                raise unavailable(directory, "tensors have other shapes than config.json asks for") from error
        refuse_random(directory, info)
        mend(model, lambda: decoder_layers(model))
        refill(model, directory)
        if dtype == "F32":
            sharpen(model)
        return cls(model.eval(), transformers.__version__, _report(info))

    def run(self, inputs: Mapping[str, NDArray[Any]], generate: int = 0) -> Arrays:
        """`hidden.0` ... `hidden.L`, `unnormed`, `logits`, with pictures `image_features`; `generate` greedy tokens.

        `inputs` are a golden file's: `input_ids` [batch, tokens], optionally `attention_mask` and picture tensors.
        """
        forget_lengths(self._model)
        given = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
        kind = self._model.dtype  # pixels in it, as processors are asked for them
        tensors = {name: one.to(kind) if one.is_floating_point() else one for name, one in given.items()}
        tensors = _with_types(self._model, {name: one.to(self._model.device) for name, one in tensors.items()})
        with torch.inference_mode(), quiet():
            with self._ends() as seen:
                out = self._model(**tensors, output_hidden_states=True, use_cache=False)
            if len(seen) < 3:
                raise unavailable(type(self._model).__name__, "the layers that were found are not its decoder's")
            entered, left, *_, last = seen
            states = in_order(out.hidden_states, entered, left)
            found = {f"hidden.{i}": state.float().cpu().numpy() for i, state in enumerate(states)}
            if last.shape == left.shape:
                found["unnormed"] = one_stream(last).float().cpu().numpy()
            found["logits"] = out.logits.float().cpu().numpy()
            if len(pictures := pictures_of(tensors)):
                found["image_features"] = features_of(self._model, pictures)
            if generate:
                found["generated"] = self._greedy(tensors, generate)
        return found

    def again(self, inputs: Mapping[str, NDArray[Any]], forced: Mapping[str, NDArray[Any]] | None = None) -> Arrays:
        """`run` with every matrix product summed in two halves.

        With `forced` (an earlier result) each decoder layer starts from the earlier result's input instead of its
        predecessor's output: `hidden.i` then holds the noise of one layer alone.
        """
        with SplitSums(), self._teacher(forced):
            return self.run(inputs)

    def forced(self, inputs: Mapping[str, NDArray[Any]], given: Mapping[str, NDArray[Any]]) -> Arrays:
        """`run` with each decoder layer starting from `hidden.i` of `given`."""
        with self._teacher(given):
            return self.run(inputs)

    def mixer(self, index: int, inputs: Mapping[str, NDArray[Any]], given: NDArray[Any]) -> NDArray[Any] | None:
        """What layer `index` adds to the residual stream before its feed-forward, for `given` [batch, tokens, width].

        None when the reference's layer has no attention module under a name known here.
        """
        layer = decoder_layers(self._model)[index]
        source = behind_mixer(layer)
        if source is None:
            return None
        kept: list[Tensor] = []
        hooks = (
            layer.register_forward_pre_hook(replace_input(torch.from_numpy(given)), with_kwargs=True),
            source.register_forward_hook(
                lambda _, __, out: kept.append(out[0] if isinstance(out, tuple | list) else out)
            ),
        )
        try:
            self.run(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return kept[0].float().cpu().numpy()

    def embed(self, ids_T: NDArray[Any], positions_T: NDArray[Any] | None = None) -> NDArray[Any]:
        """What enters the first layer for tokens that stand alone, [tokens, width] float32; no layer runs."""
        return entering(self._model, ids_T, positions_T)

    @contextlib.contextmanager
    def _ends(self) -> Iterator[list[Tensor]]:
        """What went into the first layer, what came out of it and out of the last one, once the model has run."""
        seen: list[Tensor] = []

        def first(_: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            seen[:] = [args[0] if args else kwargs["hidden_states"], stream_of(out)]

        layers = decoder_layers(self._model)
        hooks = (
            layers[0].register_forward_hook(first, with_kwargs=True),
            layers[-1].register_forward_hook(lambda _, __, out: seen.append(stream_of(out))),
        )
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _teacher(self, forced: Mapping[str, NDArray[Any]] | None) -> Iterator[None]:
        hooks = []
        layers = decoder_layers(self._model) if forced is not None else ()
        for index, layer in enumerate(layers):
            assert forced is not None
            hook = replace_input(torch.from_numpy(forced[f"hidden.{index}"]))
            hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _greedy(self, tensors: Mapping[str, Tensor], steps: int) -> NDArray[Any]:
        mask = tensors.get("attention_mask")
        if mask is not None and set(tensors) == {"input_ids", "attention_mask"} and not bool(mask.all()):
            # padding is nothing to a sequence, but DeepSeek-V4 compresses it like the rest: each row alone, without
            rows = [
                {"input_ids": row[real != 0].unsqueeze(0)} for row, real in zip(tensors["input_ids"], mask, strict=True)
            ]
            return np.concatenate([self._greedy(row, steps) for row in rows])
        if mask is not None and bool((mask[:, -1] == 0).any()):  # generation continues from the end: padding goes left
            tensors = {**tensors, **_left_padded(tensors["input_ids"], mask)}
            tensors = _with_types(self._model, {n: t for n, t in tensors.items() if n not in TYPE_NAMES})
        own = self._model.generation_config
        plain = type(own)(max_new_tokens=steps, do_sample=False, num_beams=1, use_cache=True, pad_token_id=0)
        self._model.generation_config = plain  # an end-of-sequence token does not end it: every row has all steps
        try:
            out = self._model.generate(**tensors, generation_config=plain)
        finally:
            self._model.generation_config = own
        return out[:, tensors["input_ids"].shape[1] :].cpu().numpy()


def _unpacked(directory: str | Path) -> dict[str, Tensor] | None:
    """The weights of a quantized checkpoint as what they stand for, float32; None where tensors are read as they are.

    transformers' own unpacking rounds to bfloat16, or asks for packages and devices that are not here; and it refuses
    a vocabulary whose rows are padded.
    """
    weights = Unpacked(Checkpoint.open(directory))
    return {name: weights.read(name) for name in weights.names} if weights.is_quantized or weights.is_padded else None


def without_quantization(config: Any) -> Any:
    """A configuration of the same model, stored plain."""
    for level in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if hasattr(level, key):
                delattr(level, key)
    return config


def load_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Refused(
            fatal(
                "not-available",
                "the reference implementation (transformers) is not installed",
                next="pip install 'firstlight[reference]', or verify against a golden file (--golden)",
            )
        ) from error
    return transformers


def without_memory(
    directory: str | Path, *, trust_remote_code: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """transformers' own module of a checkpoint, in `dtype`, within the mode of fake tensors that is on: shapes alone.

    Experts are multiplied all at once, which can be shaped without knowing who was chosen. Raises `Refused`.
    """
    transformers = load_transformers()
    with quiet(), part_of_transformers("initialization").no_init_weights():
        try:
            config = transformers.AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=trust_remote_code
            )
            text = config.get_text_config()
            text._experts_implementation = "batched_mm"
            kind = transformers.AutoModelForCausalLM
            if hasattr(config, "vision_config"):
                kind = transformers.AutoModelForImageTextToText
            return kind.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise unavailable(directory, str(error).strip().splitlines()[0]) from error


def part_of_transformers(name: str) -> Any:
    """One of its modules, by its name below the package."""
    load_transformers()
    return importlib.import_module(f"transformers.{name}")


def unavailable(directory: str | Path, reason: str) -> Refused:
    return Refused(
        fatal(
            "not-available",
            f"transformers cannot load this checkpoint: {reason}",
            file=str(directory),
            next="verify against a golden file (--golden) made where the reference runs",
        )
    )


def refuse_random(directory: str | Path, info: Any, expected: Callable[[str], bool] = lambda name: False) -> None:
    """Refuse a model with parameters that were not in the checkpoint, but for names `expected` to be absent."""
    read: Callable[[str], Any] = info.get if isinstance(info, Mapping) else lambda key: getattr(info, key, None)
    names = {str(name) for key in ("missing_keys", "mismatched_keys") for name in read(key) or ()}
    names = {name for name in names if not expected(name)}
    if names:
        raise Refused(
            fatal(
                "missing-tensor",
                "transformers would fill these parameters with random numbers; it cannot be the reference",
                file=str(directory),
                tensors=tuple(sorted(names)),
                expected="every parameter of the reference in the checkpoint",
                found=f"{len(names)} missing or of another shape",
                next="compare the names with the ledger (firstlight scan); verify against a golden file instead",
            )
        )


def _report(info: Any) -> dict[str, Any]:
    """transformers' own report of a loading, by name."""
    names = ("missing_keys", "unexpected_keys", "mismatched_keys")
    read: Callable[[str], Any] = info.get if isinstance(info, Mapping) else lambda key: getattr(info, key, None)
    return {name: read(name) or () for name in names}


def features_of(model: Any, pictures: Mapping[str, Tensor]) -> NDArray[Any]:
    """Picture features behind the projector [n, hidden], in order."""
    found = model.get_image_features(**pictures)
    features = getattr(found, "pooler_output", found)
    if features is None:  # Llama 4 leaves the projector to the model's own forward
        features = model.multi_modal_projector(found.last_hidden_state)
    joined = torch.cat(tuple(features)) if isinstance(features, list | tuple) else features
    return joined.float().flatten(0, -2).numpy()


class _Entered(Exception):
    """The first layer was reached."""


def entering(model: Any, ids_T: NDArray[Any], positions_T: NDArray[Any] | None) -> NDArray[Any]:
    """What enters a model's first layer for tokens that stand alone, [tokens, width] float32."""
    seen: list[Tensor] = []

    def stop(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _Entered

    given = {"input_ids": ids_T} if positions_T is None else {"input_ids": ids_T, "position_ids": positions_T}
    tensors = {name: torch.from_numpy(array.reshape(-1, 1)).to(model.device) for name, array in given.items()}
    hook = decoder_layers(model)[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.inference_mode(), quiet(), contextlib.suppress(_Entered):
            model(**tensors, use_cache=False)
    finally:
        hook.remove()
    if not seen:
        raise unavailable(type(model).__name__, "the layers that were found are not its decoder's")
    return one_stream(seen[0]).flatten(0, 1).float().cpu().numpy()


def decoder_layers(model: Any) -> Any:
    """The decoder's layers, under the names that releases have for them."""
    for root in (model.get_decoder(), model):  # of some the former is the output head
        for module in root.modules():
            for name in ("layers", "h", "blocks", "layer"):
                if isinstance(found := getattr(module, name, None), torch.nn.ModuleList):
                    return found
    raise unavailable(type(model).__name__, "its decoder has no list of layers")


def behind_mixer(layer: Any) -> Any | None:
    """The module whose output a layer adds to the residual stream first: the attention, or a norm behind it."""
    if hasattr(layer, "post_feedforward_layernorm"):  # Gemma 2, OLMo 2: what norms the feed-forward's output has a twin
        return layer.post_attention_layernorm
    names = ("post_self_attn_layernorm", "self_attn", "attn")
    return next((getattr(layer, name) for name in names if hasattr(layer, name)), None)


def stream_of(out: Any) -> Tensor:
    """What a layer hands on, of all that it returns."""
    found: Tensor = out[0] if isinstance(out, tuple | list) else out
    return found


def one_stream(state: Tensor) -> Tensor:
    """Several residual streams as golden files have them: behind one another, or one where all are alike."""
    if state.dim() == 3:
        return state
    return state[:, :, 0] if torch.equal(state, state[:, :, :1].expand_as(state)) else state.flatten(2)


def in_order(states: tuple[Tensor, ...], entered: Tensor, left: Tensor) -> tuple[Tensor, ...]:
    """The embedding, the output of each layer, the last one behind the final norm, as most architectures give them.

    Mamba's leave the embedding out and give the last layer twice, in front of the norm and behind it. `entered` and
    `left` are input and output of the first layer.
    """
    states = (entered, *states[:-2], states[-1]) if torch.equal(states[0], left) else states
    return tuple(one_stream(state) for state in states)


def pictures_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("pixel", "image"))}


def _with_types(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The marks of picture tokens, where the model asks for them beside pictures; its processor gives them as well."""
    known = inspect.signature(model.forward).parameters
    wanted = [name for name in TYPE_NAMES if name in known and name not in tensors]
    if not wanted or not pictures_of(tensors):
        return tensors
    marks = (tensors["input_ids"] == model.config.image_token_id).long()
    return {**tensors, **dict.fromkeys(wanted, marks)}


def _left_padded(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    order = torch.argsort(mask, dim=1, stable=True)
    return {"input_ids": ids.gather(1, order), "attention_mask": mask.gather(1, order)}


def replace_input(states: Tensor) -> Callable[..., tuple[Any, dict[str, Any]]]:
    def hook(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = args[0] if args else kwargs["hidden_states"]
        given = states.to(own.dtype)
        if given.dim() < own.dim():  # several residual streams: behind one another, or all alike
            given = (
                given.view_as(own) if given.numel() == own.numel() else given.unsqueeze(2).expand_as(own).contiguous()
            )
        return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

    return hook


class SplitSums(TorchFunctionMode):
    """Matrix products as the sum of two halves of the inner dim, as tensor parallelism on two ranks would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[0].shape[-1] > 1:
            x, weight = args[0], args[1]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            half = x.shape[-1] // 2
            out = func(x[..., half:], weight[..., half:]) + func(x[..., :half], weight[..., :half])
            return out if bias is None else out + bias
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and args[1].dim() > 1:
            half = args[0].shape[-1] // 2
            if half:
                left, right = args[0], args[1]
                return func(left[..., half:], right[..., half:, :]) + func(left[..., :half], right[..., :half, :])
        return func(*args, **kwargs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No remarks and no progress bars of the library in reports; its settings are put back."""
    from transformers.utils import logging as theirs

    logger = logging.getLogger("transformers")
    level, bars = logger.level, theirs.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            theirs.enable_progress_bar()
