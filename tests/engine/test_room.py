"""Memory within the limits of containers and jobs, by the files that the system keeps of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from firstlight.engine import room
from firstlight.engine.room import Limit, available_bytes, limits, memory_bytes
from tests.waiting import PATIENCE_S

GIB = 1 << 30


def group(place: Path, most: str, taken: int, stat: str) -> None:
    """A control group of version 2."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{most}\n")
    (place / "memory.current").write_text(f"{taken}\n")
    (place / "memory.stat").write_text(stat)


def first_group(place: Path, most: int, taken: int, stat: str) -> None:
    """The same of version 1."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.limit_in_bytes").write_text(f"{most}\n")
    (place / "memory.usage_in_bytes").write_text(f"{taken}\n")
    (place / "memory.stat").write_text(stat)


def of(place: Path, own: str) -> list[Limit]:
    (place / "own").write_text(own)
    return list(limits(place, place / "own"))


def test_every_group_that_a_process_lies_in_counts(tmp_path: Path) -> None:
    """A step of a job, the job's own limit above it; what is a copy of a file is not taken."""
    group(tmp_path / "slurm", "max", 0, "")
    stat = f"anon 1\nfile 9\ninactive_file {GIB}\nactive_file {2 * GIB}\n"
    group(tmp_path / "slurm/job_7", str(8 * GIB), 6 * GIB, stat)
    group(tmp_path / "slurm/job_7/step_0", str(16 * GIB), GIB, "anon 5\n")
    assert of(tmp_path, "0::/slurm/job_7/step_0\n") == [Limit(16 * GIB, GIB), Limit(8 * GIB, 3 * GIB)]


def test_a_container_sees_its_own_group_at_the_top_and_the_hosts_path(tmp_path: Path) -> None:
    group(tmp_path, str(4 * GIB), 2 * GIB, "inactive_file 4096\nactive_file 0\n")
    assert of(tmp_path, "0::/../kubepods/pod9\n") == [Limit(4 * GIB, 2 * GIB - 4096)]
    assert of(tmp_path, "0::/\n") == [Limit(4 * GIB, 2 * GIB - 4096)]


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    first_group(tmp_path / "memory/docker/a", 4 * GIB, 3 * GIB, stat)
    first_group(tmp_path / "memory", 9223372036854771712, 99 * GIB, "")
    own = "5:devices:/\n4:memory,hugetlb:/docker/a\n1:cpu:/\n0::/\n"
    assert of(tmp_path, own) == [Limit(4 * GIB, GIB), Limit(9223372036854771712, 99 * GIB)]


@pytest.mark.parametrize("most", ["", "twelve", "max"])
def test_what_says_nothing_is_no_limit(most: str, tmp_path: Path) -> None:
    group(tmp_path / "a", most, 5, "")
    assert of(tmp_path, "0::/a\n") == of(tmp_path, "") == list(limits(tmp_path, tmp_path / "absent")) == []


def test_the_narrowest_limit_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    without = memory_bytes()
    monkeypatch.setattr(room, "limits", lambda: iter((Limit(1 << 62, 0), Limit(3 * GIB, 2 * GIB), Limit(GIB, 2 * GIB))))
    assert memory_bytes() == GIB < without
    assert available_bytes() == 0, "more is taken than there is: nothing is left, and not less"


@contextmanager
def narrow_group(most: int) -> Iterator[Path]:
    """A real control group with a limit, below our own; skips where we may not make one."""
    (line,) = [one for one in Path("/proc/self/cgroup").read_text().splitlines() if "memory" in one] or ["0::/"]
    _, controllers, own = line.split(":", 2)
    top = room.GROUPS / "memory" if controllers else room.GROUPS
    place = top / own.lstrip("/") / f"firstlight-test-{os.getpid()}"
    file = "memory.limit_in_bytes" if controllers else "memory.max"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (place / file).exists():
            pytest.skip("control groups here do not limit memory")
        (place / file).write_text(str(most))
        yield place
    finally:
        with suppress(OSError):  # it may still count whoever has just ended
            place.rmdir()


def test_a_process_in_a_narrow_group_knows() -> None:
    code = (
        "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from firstlight.engine.room import available_bytes, memory_bytes\n"
        "from firstlight.engine.parallel.hardware import local_cluster\n"
        "print(memory_bytes(), available_bytes(), local_cluster(2).device.memory_bytes)"
    )
    with narrow_group(256 << 20) as place:
        command = [sys.executable, "-c", code, str(place)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S)
    whole, free, of_one = map(int, run.stdout.split())
    assert whole == 256 << 20
    assert 0 < free <= whole
    assert of_one == whole // 2
