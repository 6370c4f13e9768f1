"""Whether files that are read more than once are still what they were, beyond what their sizes and times say.

Who puts an old time back on a file that was rewritten cannot put back when its inode was last changed. A change of
attributes alone, of rights or of links, cannot be told from that, so it counts as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from firstlight.engine.parallel.pieces import Piece
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.sources.base import absent, changed
from firstlight.engine.weights.sources.local import LocalFiles


class Untouched:
    """The files of some pieces as they are now; sources far away have versions of their own, which reads look at."""

    def __init__(self, checkpoint: Checkpoint, pieces: Iterable[Piece]) -> None:
        self._checkpoint = checkpoint
        self._source = checkpoint.source if isinstance(checkpoint.source, LocalFiles) else None
        self._was = {name: self._now(name) for name in self._files(pieces)} if self._source is not None else {}

    def check(self, pieces: Iterable[Piece] | None = None) -> None:
        """Raises `Refused` (changed-file) where a file of these pieces, of all without any, was changed since."""
        for name in self._was if pieces is None else self._files(pieces):
            was, now = self._was.get(name), self._now(name) if self._source is not None else None
            if was != now:
                raise changed(str(self._source and self._source.path(name)), f"as it was, {was}", str(now))

    def _files(self, pieces: Iterable[Piece]) -> dict[str, None]:
        found: dict[str, None] = {}
        for piece in pieces:
            if piece.packed is None:
                found[self._checkpoint.tensors[piece.tensor].file] = None
            else:
                found.update(dict.fromkeys(info.file for _, info in piece.packed.stored()))
        return found

    def _now(self, name: str) -> str:
        assert self._source is not None
        path = self._source.path(name)
        try:
            found = path.stat()
        except OSError as error:
            raise absent(str(path)) from error
        return f"inode {found.st_ino} last changed at {found.st_ctime_ns / 1e9:.6f}, {found.st_size} bytes"
