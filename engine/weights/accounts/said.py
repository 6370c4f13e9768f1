"""Finds contradictions and unread options in what configurations say about quantization. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from firstlight.engine.findings import Finding, several, warning
from firstlight.engine.weights.formats.announced import KEYS, announcements
from firstlight.engine.weights.formats.refusing import mapping
from firstlight.engine.weights.formats.scheme import Scheme

MODELOPT = "hf_quant_config.json"  # where ModelOpt says how weights are stored


def two_algorithms(config: Mapping[str, Any], beside: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What ModelOpt says twice, in two files."""
    said = [
        mapping(mapping(where).get(key)).get("quant_algo")
        for where, key in ((config, KEYS[0]), (beside, "quantization"))
    ]
    if None not in said and said[0] != said[1]:
        yield warning(
            "conflicting-flag",
            f"config.json names quant_algo {said[0]}, {MODELOPT} {said[1]}; config.json is followed",
            file=MODELOPT,
            expected=str(said[0]),
            found=str(said[1]),
            next="fetch both from one release",
        )


def two_levels(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Quantization that is announced at two levels of a configuration, and not alike."""
    said = announcements(config)
    first = next(iter(said), "")
    for where in [where for where in said if said[where] != said[first]]:
        yield warning(
            "conflicting-flag",
            f"config.json has {first} and {where}, which differ; {first} is followed",
            file="config.json",
            expected=f"{where} as {first}",
            found=f"{where} = {said[where]}"[:200],
            next="fetch config.json again, or remove the one that is not meant",
        )


def without_consequences(findings: Iterable[Finding], refusals: Collection[Finding]) -> Iterator[Finding]:
    """What an account finds where the way weights are stored is not read: the refusal, and notes of what follows.

    One note a code; nobody is sent for a shard, or for another name, that is not at fault. Norms are stored plain by
    every tool, so what is said of them stands.
    """
    causes = [finding.message for finding in refusals if finding.severity == "fatal"]
    follows: dict[str, list[Finding]] = {}
    for finding in findings:
        if (
            finding in refusals
            or not causes
            or finding.severity != "fatal"
            or all("norm" in n for n in finding.tensors)
        ):
            yield finding
        elif finding.code != "unsupported-format":  # codes that nothing announces: something did
            follows.setdefault(finding.code, []).append(finding)
    for first, *others in follows.values():
        more = f", and {several(len(others), 'finding', 'findings')} alike" if others else ""
        yield msgspec.structs.replace(
            first,
            severity="note",
            message=f"{first.message}{more}: it follows from how weights are stored, which is not read",
            tensors=tuple(dict.fromkeys(name for finding in (first, *others) for name in finding.tensors)),
            more_tensors=sum(finding.more_tensors for finding in (first, *others)),
            next=f"nothing here: {causes[0]}",
        )


def unread(scheme: Scheme) -> Iterator[Finding]:
    """Options of a quantization that may be about numbers, and that nothing reads."""
    if scheme.unread:
        yield warning(
            "unread-config-key",
            f"quantization {scheme.method!r} has options that nothing reads: {', '.join(scheme.unread)}",
            file="config.json",
            expected=f"options that are known of {scheme.method!r}",
            found=", ".join(scheme.unread),
            next="look up what they mean to the tool that wrote them: weights are read as if they were not there",
        )
