"""What no family is native to, through transformers: known by its configuration, loaded whole, on one rank.

`use` registers it with the engine of this process; ranks that are started are told its name (`NAMES`). Nothing here
imports transformers before a configuration is asked about that no family knows.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, warning
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignSpec, foreign_spec
from firstlight.engine.model.spec.foreign import ForeignVision
from firstlight.engine.model.values import impossible

if TYPE_CHECKING:
    import torch

    from firstlight.engine.model.foreign import ForeignModel
    from firstlight.engine.weights.checkpoint import Checkpoint

Mode = Literal["never", "auto", "always"]
NAMES: Mapping[Mode, str] = {"never": "", "auto": f"{__name__}:auto", "always": f"{__name__}:always"}
MOST_CODE_BYTES = 4 << 20  # of a file that is parsed for what it imports
DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


class Transformers:
    """Provides the models that transformers has; `always`: also those that a family here knows."""

    def __init__(self, checkpoint: str, trust_remote_code: bool = False, always: bool = False) -> None:
        self.checkpoint = checkpoint
        self.trust_remote_code = trust_remote_code
        self.always = always

    def describe(self, raw: Mapping[str, Any]) -> ForeignSpec | None:
        """See `Foreign.describe`; None too where transformers is not installed."""
        if not self._may_know(raw):
            return None
        config, version = self._config(raw)
        if config is None:
            return None
        by = f"transformers {version}"
        try:
            sizes = _sizes(config)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise _unusable(str(raw.get("model_type")), error) from error
        return foreign_spec(
            by,
            str(raw.get("model_type")),
            **sizes,
            tied_head=bool(getattr(config, "tie_word_embeddings", False)),
            dtype=DTYPES.get(str(getattr(config, "dtype", None)), "F32"),
            findings=(_warning(raw, by, self.always),),
        )

    def _may_know(self, raw: Mapping[str, Any]) -> bool:
        """Whether asking can help at all: importing transformers takes seconds, looking for a word in it does not."""
        package, model_type = find_spec("transformers"), raw.get("model_type")
        if package is None or (self.trust_remote_code and "auto_map" in raw):
            return package is not None
        if not isinstance(model_type, str) or not model_type:
            return False
        named = (f"{quote}{model_type}{quote}".encode() for quote in "\"'")
        home = Path(package.origin or "").parent / "models" / "auto"
        texts = [path.read_bytes() for path in home.glob("*.py")]
        return not texts or any(word in text for word in named for text in texts)

    def load(self, checkpoint: Checkpoint, spec: ForeignSpec, dtype: str, device: torch.device) -> ForeignModel:
        """See `Foreign.load`."""
        from firstlight.workbench.foreign_model import load

        return load(checkpoint, spec, dtype, device, self.trust_remote_code)

    def _config(self, raw: Mapping[str, Any]) -> tuple[Any, str]:
        """transformers' own configuration object, None if it does not know the architecture either; its version."""
        from firstlight.workbench.reference import load_transformers, part_of_transformers, quiet

        transformers, model_type = load_transformers(), raw.get("model_type")
        known = part_of_transformers("models.auto.configuration_auto").CONFIG_MAPPING_NAMES
        with quiet():
            if model_type in known and _computes(str(model_type)):
                fields = {key: value for key, value in raw.items() if key != "model_type"}
                try:
                    return transformers.AutoConfig.for_model(model_type, **fields), transformers.__version__
                except errors_of_configs() as error:
                    raise _unusable(str(model_type), error) from error
            if self.trust_remote_code and "auto_map" in raw and Path(self.checkpoint).is_dir():
                broken: tuple[type[Exception], ...] = (*errors_of_configs(), *ERRORS_OF_CODE)
                try:
                    found = transformers.AutoConfig.from_pretrained(
                        self.checkpoint, local_files_only=True, trust_remote_code=True
                    )
                except broken as error:
                    raise _broken_code(str(model_type), error) from error
                return found, f"{transformers.__version__}, running the checkpoint's own code"
        return None, ""


def _sizes(config: Any) -> dict[str, Any]:
    """What transformers' configuration says of sizes. Raises TypeError and the like for what cannot be one."""
    text = config.get_text_config()
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        if (found := impossible(key, getattr(text, key), 1)) is not None:
            raise ValueError(f"{key} = {str(found[1])[:60]}, where {found[2]} is expected")
    image_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    sees = getattr(config, "vision_config", None) is not None
    return {
        "num_layers": int(text.num_hidden_layers),
        "vocab_size": int(text.vocab_size),
        "hidden": int(text.hidden_size),
        "max_positions": int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        "vision": ForeignVision(image_token_id=-1 if image_token is None else int(image_token)) if sees else None,
    }


ERRORS_OF_CODE = (ImportError, OSError, SyntaxError, NameError, RuntimeError)


def _computes(model_type: str) -> bool:
    """Whether transformers has a model of that type which continues texts."""
    from firstlight.workbench.reference import part_of_transformers

    names = part_of_transformers("models.auto.modeling_auto")
    return any(
        model_type in mapping
        for mapping in (names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    )


def errors_of_configs() -> tuple[type[Exception], ...]:
    """What transformers raises for values of a configuration that it cannot use."""
    strict = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    return (strict, TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError)


def _unusable(model_type: str, error: Exception) -> Refused:
    return Refused(
        fatal(
            "config-invalid",
            f"transformers cannot use the configuration of {model_type}: {str(error)[:200]}",
            file="config.json",
            expected="values as the releases of this architecture have them",
            found=type(error).__name__,
            next="fetch the release's own config.json again",
        )
    )


def _broken_code(model_type: str, error: Exception) -> Refused:
    return Refused(
        fatal(
            "not-available",
            f"the code that the checkpoint brings for {model_type} does not run: {str(error)[:200]}",
            expected="modules as its auto_map names them, and what they import",
            found=type(error).__name__,
            next="install what scan lists among its imports, or work without --trust-remote-code",
        )
    )


def _warning(raw: Mapping[str, Any], by: str, chosen: bool) -> Finding:
    why = "the reference was asked for" if chosen else "no family here is native to it"
    return warning(
        "fallback",
        f"{raw.get('model_type')} runs in the modules of {by}: {why}",
        file="config.json",
        expected="a family of ours, verified against the reference",
        found="the reference itself, on one rank and one device, without our operators",
        next="write a family file (engine/model/families) to divide it and to hold it against something",
    )


def auto(checkpoint: str, trust_remote_code: bool = False) -> Transformers:
    """What no family knows."""
    return Transformers(checkpoint, trust_remote_code)


def always(checkpoint: str, trust_remote_code: bool = False) -> Transformers:
    """Everything, natively known or not."""
    return Transformers(checkpoint, trust_remote_code, always=True)


def use(mode: Mode, checkpoint: str, trust_remote_code: bool = False) -> str:
    """Registers the fallback in this process, or takes it away; the name under which ranks find it."""
    made = {"never": None, "auto": auto, "always": always}[mode]
    FAMILIES.fall_back(None if made is None else made(checkpoint, trust_remote_code))
    return NAMES[mode]


def mode_of(asked: str) -> Mode:
    """The mode by its own name, or by the name under which ranks find it; another word is refused."""
    for mode, name in NAMES.items():
        if asked in (mode, name):
            return mode
    raise Refused(
        fatal("usage", f"{asked!r} is no fallback", expected=", ".join(NAMES), found=asked, next="correct fallback")
    )


def remote_code(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """The code that a checkpoint brings: files, sizes, what they import, and which classes config.json takes from them.

    Files are parsed and not run.
    """
    named: dict[str, list[str]] = {}
    auto_map = checkpoint.config.get("auto_map")
    for key, target in (auto_map if isinstance(auto_map, Mapping) else {}).items():
        for one in target if isinstance(target, list) else [target]:
            module, _, name = str(one).rpartition(".")
            named.setdefault(f"{module.rpartition('--')[2]}.py", []).append(f"{key}: {name}")
    home = Path(checkpoint.directory)
    files = {path.relative_to(home).as_posix(): path for path in sorted(home.rglob("*.py")) if path.is_file()}
    for name in sorted({*files, *named}):
        path = files.get(name)
        yield {
            "file": name,
            "there": path is not None,
            "total_bytes": path.stat().st_size if path is not None else 0,
            "imports": imports_of(path) if path is not None else "",
            "named_by": "; ".join(named.get(name, ())),
        }


def imports_of(path: Path) -> str:
    """The top-level packages that a file of Python imports; the file is parsed, never run."""
    if path.stat().st_size > MOST_CODE_BYTES:
        return f"not read: more than {MOST_CODE_BYTES:,} bytes"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"not Python: {str(error)[:80]}"
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").partition(".")[0])
    return ", ".join(sorted(found))


def refuse_unused_trust(trust_remote_code: bool, mode: Mode) -> None:
    """Trust without anything that could make use of it is a mistake worth saying."""
    if trust_remote_code and mode == "never":
        raise Refused(
            fatal(
                "usage",
                "the checkpoint's code runs only in the reference, which --fallback never leaves out",
                expected="--fallback auto or always",
                found="--trust-remote-code with --fallback never",
                next="leave one of the two out",
            )
        )
