"""Every architecture that transformers has, tried from outside.

    python -m tests.sweep                        # all causal and image-text architectures, class defaults made tiny
    python -m tests.sweep all deepseek_v3 glm4   # these
    python -m tests.sweep tiny [NAME ...]        # the tiny models of tests/families, stored and prompted in other ways
    python -m tests.sweep flips [NAME ...]       # each key of their configurations, one at a time, at another value
    python -m tests.sweep meshes [NAME ...]      # the tiny models as they are, for --meshes "tp2,pp2,ep2"
    python -m tests.sweep vision [NAME ...]      # the same of models that see: keys of towers and projectors
    python -m tests.sweep pictures [NAME ...]    # models that see in other sizes, with other pictures, generating

A line of JSON a case goes to build/sweep/<mode>.jsonl; at the end stands a table: an architecture, what became of
it (native, fallback, refused, wrong, crashed; unbuilt: transformers itself cannot make or run it), its largest error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from firstlight.engine.parallel.mesh import Mesh
from tests.sweep import inside, outside, small

OUT = Path(__file__).resolve().parents[2] / "build" / "sweep"
Row = dict[str, Any]


class Sweep:
    """Builds cases in a scratch folder, tries them, writes their rows."""

    def __init__(self, mode: str, meshes: Sequence[str], scratch: Path, out: Path | None = None) -> None:
        self.meshes, self.scratch, self.rows = meshes, scratch, list[Row]()
        OUT.mkdir(parents=True, exist_ok=True)
        self._log = (out or OUT / f"{mode}.jsonl").open("w")

    def case(
        self,
        name: str,
        variant: str,
        raw: small.Raw,
        tokens: int = 24,
        *,
        steps: int = 0,
        stored: torch.dtype = torch.float32,
        bare: Sequence[str] = (),
        positions: bool = True,
        given: outside.Tensors | None = None,
        unless: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """One configuration: built, run outside, tried inside. Logits, or None where transformers cannot.

        `bare`: keys taken out of the saved config.json (they hold the class's defaults). `unless`: logits of another
        configuration; where they are equal nothing is tried.
        """
        home = self.scratch / "case"
        shutil.rmtree(home, ignore_errors=True)
        try:
            model = outside.model_of(raw)
            given = outside.prompts(_vocab(model), tokens) if given is None else given
            if stored != torch.float32:
                outside.write(model, home, given, {}, stored)
                model = outside.reopened(model, home)
                files = {path: path.read_bytes() for path in home.iterdir()}
            found = outside.run(model, given, steps, positions)
            if unless is not None and torch.equal(found["logits"], unless):
                return found["logits"]
            golden = outside.write(model, home, given, found)
            if stored != torch.float32:
                for path, content in files.items():
                    path.write_bytes(content)
        except Exception as error:  # noqa: BLE001 - transformers raises whatever it likes
            self.row(name, variant, "1", inside.Result("unbuilt", why=f"{type(error).__name__}: {error}"[:200]))
            return None
        if bare:
            _without(home / "config.json", bare)
        result = inside.tried(home, golden)
        if result.word == "wrong" and "pixel_values" not in given and not outside.heeds_padding(model, given, found):
            given = {**given, "attention_mask": torch.ones_like(given["input_ids"])}
            variant += " (no padding: it changes the reference)"
            golden = outside.write_golden(home, given, outside.run(model, given, steps))
            result = inside.tried(home, golden)
        self.row(name, variant, "1", result)
        for mesh in self.meshes if result.word == "native" else ():
            axes = {part[:2]: int(part[2:]) for part in mesh.split("+")}
            self.row(name, variant, mesh, inside.tried(home, golden, Mesh(**axes)))
        return found["logits"]

    def row(self, name: str, variant: str, mesh: str, result: inside.Result) -> None:
        row = {"name": name, "variant": variant, "mesh": mesh, **asdict(result)}
        self.rows.append(row)
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()
        error = "" if result.error is None else f"{result.error:.1e}"
        said = " | ".join(s for s in result.said if not s.startswith("fallback"))
        print(f"{name:24} {variant:56.56} {mesh:5} {result.word:8} {error:8} {result.why} {said}", flush=True)


def _vocab(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _without(path: Path, keys: Sequence[str]) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in keys}))


def all_types() -> list[str]:
    """Model types of decoders and of image-text models, in order."""
    from transformers.models.auto import modeling_auto as auto

    names = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted(names)


def every(sweep: Sweep, names: Sequence[str]) -> None:
    for name in names or all_types():
        try:
            raw = small.tiny(name)
        except Exception as error:  # noqa: BLE001 - transformers raises whatever it likes
            sweep.row(name, "defaults", "1", inside.Result("unbuilt", why=f"{type(error).__name__}: {error}"[:200]))
            continue
        if sweep.case(name, "defaults", raw, steps=3) is None:
            continue
        sweep.case(name, "defaults, keys left out", raw, bare=list(_defaulted(raw)))


def _defaulted(raw: small.Raw) -> Iterator[str]:
    """Keys that hold the class's default, apart from sizes."""
    import transformers

    known = transformers.CONFIG_MAPPING[raw["model_type"]]().to_dict()
    yield from (key for key in known if key not in raw and key not in ("model_type", "architectures", "vocab_size"))


def families(names: Sequence[str]) -> dict[str, tuple[small.Raw, int]]:
    from tests.checkpoints import TINY

    chosen = {name: case for name, case in TINY.items() if "vision_config" not in case.config}
    return {
        name: (json.loads(json.dumps(dict(case.config))), case.tokens)
        for name, case in chosen.items()
        if not names or name in names
    }


def tiny(sweep: Sweep, names: Sequence[str]) -> None:
    for name, (raw, tokens) in families(names).items():
        sweep.case(name, "as it is", raw, min(tokens, 200), steps=4)
        sweep.case(name, "4 tokens", raw, 4)
        sweep.case(name, "columns counted, padding included", raw, min(tokens, 200), positions=False)
        sweep.case(name, "bfloat16", raw, 24, stored=torch.bfloat16)
        longer = {"max_position_embeddings": max(raw.get("max_position_embeddings", 0), 256), "vocab_size": 257}
        sweep.case(name, "160 tokens", {**raw, **longer}, 160)
        sweep.case(name, "other head", {**raw, "tie_word_embeddings": not raw.get("tie_word_embeddings", True)})


def flips(sweep: Sweep, names: Sequence[str]) -> None:
    done: set[str] = set()
    for name, (raw, tokens) in families(names).items():
        if not names and raw["model_type"] in done:  # one tiny model a type, unless it is named
            continue
        done.add(raw["model_type"])
        try:
            full = outside.model_of(raw).config.to_dict()
        except Exception as error:  # noqa: BLE001 - transformers raises whatever it likes
            sweep.row(name, "flips", "1", inside.Result("unbuilt", why=f"{type(error).__name__}: {error}"[:200]))
            continue
        base = sweep.case(name, "as it is", raw, min(tokens, 40))
        for what, change in small.flips(full):
            sweep.case(name, what, small.merged(raw, change), min(tokens, 40), unless=base)


def divided(sweep: Sweep, names: Sequence[str]) -> None:
    for name, (raw, tokens) in families(names).items():
        sweep.case(name, "as it is", raw, min(tokens, 40), steps=3)


def vision(sweep: Sweep, names: Sequence[str]) -> None:
    from tests import vision_checkpoints as seeing

    for name, raw in seeing.MODELS.items():
        if names and name not in names:
            continue
        given = {key: torch.from_numpy(value) for key, value in seeing.inputs(name).items()}
        try:
            full = outside.model_of(raw).config.to_dict()
        except Exception as error:  # noqa: BLE001 - transformers raises whatever it likes
            sweep.row(name, "flips", "1", inside.Result("unbuilt", why=f"{type(error).__name__}: {error}"[:200]))
            continue
        base = sweep.case(name, "as it is", raw, given=given)
        for what, change in small.flips(full):
            if "text_config" not in change:
                sweep.case(name, what, small.merged(raw, change), given=given, unless=base)


def seen(sweep: Sweep, names: Sequence[str]) -> None:
    from tests.sweep import pictures

    for variant in pictures.all_variants(names):
        sweep.case(variant.base, variant.what, variant.raw, given=pictures.given(variant), steps=4)


def table(rows: Sequence[Row]) -> str:
    """An architecture, counts of words, and the largest error on each mesh."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        words = {word: sum(row["word"] == word for row in own) for word in dict.fromkeys(row["word"] for row in own)}
        worst = {
            mesh: max((row["error"] for row in own if row["mesh"] == mesh and row["error"] is not None), default=0.0)
            for mesh in dict.fromkeys(row["mesh"] for row in own)
        }
        errors = ", ".join(f"{mesh}: {error:.1e}" for mesh, error in worst.items())
        lines.append(f"| {name} | {', '.join(f'{count} {word}' for word, count in words.items())} | {errors} |")
    return "\n".join(("| architecture | cases | largest error by mesh |", "| --- | --- | --- |", *lines))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.sweep", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "mode", nargs="?", default="all", choices=("all", "tiny", "flips", "meshes", "vision", "pictures")
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--meshes", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(1)
    meshes = [mesh.strip() for mesh in asked.meshes.split(",") if mesh.strip()]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="firstlight-sweep-") as scratch:
        sweep = Sweep(asked.mode, meshes, Path(scratch), asked.out)
        modes = {"all": every, "tiny": tiny, "flips": flips, "meshes": divided, "vision": vision, "pictures": seen}
        modes[asked.mode](sweep, asked.names)
    print(table(sweep.rows))
    bad = [row for row in sweep.rows if row["word"] in ("wrong", "crashed")]
    print(f"{len(sweep.rows)} cases in {time.monotonic() - started:.0f} s, {len(bad)} wrong or crashed")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
