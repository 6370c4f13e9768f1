"""The rung `preprocess`: what would go into the model for a prompt and pictures, written to a safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.pictures import open_picture
from firstlight.engine.inputs.prepare import Prepared, Processor
from firstlight.engine.weights.files import safetensors_file


def preprocess(
    checkpoint_dir: str | Path,
    prompt: str,
    images: Sequence[str | Path | bytes] = (),
    chat: bool = False,
    out: str | Path | None = None,
    apply_exif: bool = True,
) -> Prepared:
    """Prepare a prompt and pictures as the checkpoint's own processor does, and write `out` (safetensors).

    The file holds `input_ids` and `attention_mask` [1, tokens] int64 and the image tensors under the vendor's names and
    dtypes. `chat`: the prompt is one user turn, pictures first, in the checkpoint's chat template with its generation
    prompt. `images`: files, bytes of files, or data: URLs. Pictures for a processor whose steps are not known here go
    through the vendor's own in transformers, which is said. Raises `Refused`.
    """
    processor = Processor.open(checkpoint_dir)
    pictures = [open_picture(image, apply_exif=apply_exif) for image in images]
    try:
        prepared = processor.prepare(prompt, pictures, chat)
    except Refused as refused:
        if not pictures or {finding.code for finding in refused.findings} != {"unsupported-block"}:
            raise
        from firstlight.workbench import vendor_inputs

        prepared = vendor_inputs.prepared(processor, prompt, pictures, chat, refused)
    if out is not None:
        safetensors_file.write(out, prepared.arrays())
    return prepared
