"""Reads objects of S3, Google Cloud Storage and Azure through obstore, with its own credential chain."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.settings import bad_endpoints
from firstlight.engine.weights.sources.base import (
    FileStat,
    ReadShape,
    Usage,
    absent,
    changed,
    ended_early,
    read_rows_at_once,
)
from firstlight.engine.weights.sources.retry import Arrived, Interrupted, Patience, Retry, Target, fill

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
OBJECT_SHAPE = ReadShape(chunk_bytes=16 << 20, smallest_bytes=8 << 20, gap_bytes=256 << 10, in_flight=16)
CREDENTIALS = (
    (("s3", "s3a"), "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or the machine's role; AWS_SKIP_SIGNATURE=true: none"),
    (("gs",), "GOOGLE_APPLICATION_CREDENTIALS or the machine's account; GOOGLE_SKIP_SIGNATURE=true: none"),
    (SCHEMES, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or _TOKEN; AZURE_SKIP_SIGNATURE=true: none"),
)  # by scheme, where the library looks for them
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
WAYS = (
    (("builder error", "URL scheme is not allowed"), "if plain HTTP is meant, set AWS_ALLOW_HTTP=true"),
    (NO_BUCKET, "correct the bucket's name; where it is at another provider, set AWS_ENDPOINT_URL"),
    (("ExpiredToken", "TokenRefreshRequired", "RequestExpired"), "the credentials have expired: renew them"),
    (("TimeTooSkewed",), "set this machine's clock right: requests are signed with its time"),
    (
        ("redirect without LOCATION", "PermanentRedirect", "HeaderMalformed", "IllegalLocation"),
        "the bucket is in another region: set AWS_REGION to its own",
    ),
)  # by what the library or the store says, what helps
FINAL = ("builder error", "URL scheme is not allowed", "redirect without LOCATION", "169.254.169.254", "privileges")
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
MOST_WORDS = 300
PART_BYTES = 1 << 20  # what is taken from an answer at a time


class ObjectStore:
    """Objects below the prefix of `url`, such as s3://bucket/prefix; names have no slash in them."""

    shape = OBJECT_SHAPE

    def __init__(self, url: str, pinned: Mapping[str, FileStat] | None = None, retry: Retry | None = None) -> None:
        self.url = url.rstrip("/")
        self.usage = Usage()
        self.retry = retry or Retry()
        self._pinned = dict(pinned or {})
        self._library = library()
        for name, value in bad_endpoints().items():
            raise Refused(
                fatal(
                    "usage",
                    f"the environment variable {name} holds no address",
                    expected="https://HOST",
                    found=value,
                    next=f"correct or unset {name}",
                )
            )
        try:
            self.store = self._library.store.from_url(
                self.url,
                # No client options: given any, the library forgets those of the environment. It gives up after 30 s.
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=4 * self.retry.stall_s)},
            )
        except (self._library.exceptions.BaseError, ValueError) as error:
            raise self._refused(self.url, error) from error

    def names(self) -> tuple[str, ...]:
        """Objects directly below the prefix; sizes and versions are known from then on."""
        if not self._pinned:
            found = self._asked(self.url, lambda: self._library.list_with_delimiter(self.store)["objects"])
            self._pinned = {meta["path"].rpartition("/")[2]: _stat(meta) for meta in found}
        return tuple(sorted(self._pinned))

    def stat(self, name: str) -> FileStat:
        if name not in self._pinned:
            self._pinned[name] = _stat(self._asked(self.address(name), lambda: self._library.head(self.store, name)))
        return self._pinned[name]

    def open(self, name: str) -> ObjectFile:
        return ObjectFile(self, name, self.stat(name))

    def address(self, name: str) -> str:
        return f"{self.url}/{name}"

    def describe(self) -> str:
        counts = self.usage.counts()
        retries = f", {counts['retries']} of them again" if counts.get("retries") else ""
        return f"{counts.get('fetched', 0) / 1e6:,.0f} MB in {counts.get('requests', 0):,} range requests{retries}"

    def read(self, name: str, target: Target, expected: FileStat) -> None:
        """One request for the whole target; what came stays if it breaks off. `Interrupted` where that may pass."""
        errors = self._library.exceptions
        file = self.address(name)
        options: dict[str, Any] = {"range": (target.offset_bytes, target.offset_bytes + target.left)}
        if expected.version is not None and expected.version.startswith('"'):
            options["if_match"] = expected.version
        try:
            result = self._library.get(self.store, name, options=options)
            now = _stat(result.meta)
            if now != expected:
                raise changed(file, _words(expected), _words(now))
            for part in result.stream(min_chunk_size=PART_BYTES):
                target.accept(memoryview(part))
        except errors.PreconditionError as error:
            raise changed(file, _words(expected), "another version") from error
        except FileNotFoundError as error:
            raise absent(file) from error
        except (errors.BaseError, OSError) as error:
            if not may_pass(str(error)):
                raise self._refused(file, error) from error
            raise Interrupted(words_of(error)) from error

    def _asked(self, file: str, ask: Callable[[], Any]) -> Any:
        """What the store says of a file or of all of them; asked again, with patience, where it may say more later."""
        patience = Patience(self.retry)
        while True:
            try:
                return ask()
            except FileNotFoundError as error:
                raise absent(file) from error
            except (self._library.exceptions.BaseError, ValueError, OSError) as error:
                if patience.ends() or not may_pass(str(error)):
                    raise self._refused(file, error) from error
            self.usage.add("retries")
            patience.pause(None)

    def _where(self) -> str:
        """Where the library looks for credentials of this provider, and how it is told that none are needed."""
        scheme = self.url.partition("://")[0]
        found = next((words for schemes, words in CREDENTIALS if scheme in schemes), None)
        return found or "the environment, as the provider's tools say"

    def _refused(self, file: str, error: Exception) -> Refused:
        text = words_of(error)
        ways = (way for words, way in WAYS if any(word in text for word in words))
        way = f"check address, credentials and network; credentials come from {self._where()}"
        return Refused(
            fatal(
                "not-found" if any(word in text for word in NO_BUCKET) else "read-failed",
                f"{file} cannot be read: {text}",
                file=file,
                expected="an object store that answers",
                found=type(error).__name__,
                next=next(ways, way),
            )
        )


class ObjectFile:
    """One object; every answer is held against the etag that was listed."""

    def __init__(self, source: ObjectStore, name: str, expected: FileStat) -> None:
        self._source = source
        self._name = name
        self._expected = expected
        self._stop = threading.Event()

    def read_into(self, offset_bytes: int, buffers: list[memoryview], arrived: Arrived | None = None) -> None:
        target = Target(offset_bytes, buffers, arrived)
        source, file = self._source, self._source.address(self._name)
        end = offset_bytes + target.left
        if end > self._expected.nbytes:
            raise ended_early(file, self._expected.nbytes, end, target.left)
        fill(
            target,
            lambda one: source.read(self._name, one, self._expected),
            source.retry,
            source.usage,
            file,
            self._stop,
        )

    def read_rows(self, offset_bytes: int, target: memoryview, span_bytes: int, stride_bytes: int) -> None:
        read_rows_at_once(self, offset_bytes, target, span_bytes, stride_bytes, OBJECT_SHAPE.gap_bytes)

    def check(self) -> None:
        """Nothing is left to check: each answer was."""

    def stop(self) -> None:
        """Ask for nothing again; the library ends what it is at, after `stall_s` at the latest."""
        self._stop.set()

    def close(self) -> None:
        """Connections belong to the library."""


def library() -> ModuleType:
    """obstore; `Refused` says how to get it where it is not installed."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise Refused(
            fatal(
                "not-available",
                "reading from an object store needs the package obstore",
                expected="obstore",
                found="not installed",
                next="pip install 'firstlight[cloud]'",
            )
        ) from error
    return obstore


def _stat(meta: Mapping[str, Any]) -> FileStat:
    modified = meta.get("last_modified")
    return FileStat(meta["size"], _etag(meta.get("e_tag")) or (modified.isoformat() if modified else None))


def _etag(found: str | None) -> str | None:
    """An etag in quotes, as in the header of an answer; in Azure's listings there are none."""
    return found if not found or found.startswith(('"', "W/")) else f'"{found}"'


def _words(stat: FileStat) -> str:
    return f"{stat.nbytes} bytes, version {stat.version}"


def may_pass(text: str) -> bool:
    """Whether what the library tells of a request may be otherwise later: no answer, or one of a store that is busy."""
    if any(word in text for word in FINAL):
        return False
    status = re.search(r"status code: (\d{3})", text)
    return status is None or int(status[1]) in TRY_AGAIN


def words_of(error: Exception) -> str:
    """The library's first line; of an answer in XML (S3, Azure) its code and message instead of what else is in it.

    Addresses are told without what stands behind a question mark.
    """
    said = str(error).partition("Debug source:")[0].strip()
    line = (said.splitlines() or [type(error).__name__])[0].partition("<?xml")[0].rstrip(": ")
    line = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", line)[:MOST_WORDS]  # a query may hold a signature
    code = re.search(r"<Code>\s*([^<]+?)\s*</Code>", said)
    message = re.search(r"<Message>\s*([^<]+?)\s*</Message>", said)
    return ": ".join((line, *(found[1][:MOST_WORDS] for found in (code, message) if found is not None)))
