"""Seconds from the start of a process: help, scan, and the first token of `generate` (beside transformers).

And of an engine over a large checkpoint: from the first byte asked for to the first token, with all loaded before
anything runs and with a streaming start, files in the page cache and not.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from tests.benchmarks.bench_residency import fresh
from tests.benchmarks.big import big_checkpoint
from tests.benchmarks.common import machine, median, setting, show, spread, take_turns

BIG_BYTES = 2_000_000_000

PROMPT = "What is the capital of France?"
THEIRS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(int(sys.argv[3]))
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
messages = [{"role": "user", "content": sys.argv[2]}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, do_sample=False, max_new_tokens=1)[0, -1:]), flush=True)
"""


def first_output_s(command: list[str]) -> float:
    """Until the process wrote its first byte to standard output; it must end well."""
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        taken_s = time.perf_counter() - started_s
        process.stdout.read()
        error = process.stderr.read()
    if not first or process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{error.decode()}")
    return taken_s


def main() -> None:
    given = setting(__doc__)
    firstlight = [sys.executable, "-m", "firstlight.workbench"]
    directory, threads = str(given.checkpoint), str(given.threads)
    generate = ["generate", directory, "--prompt", PROMPT, "--max-new-tokens", "1"]
    commands = {
        "firstlight --help": [*firstlight, "--help"],
        "firstlight scan": [*firstlight, "scan", directory, "-q", "--json", "-"],
        "firstlight generate, first token": [*firstlight, *generate],
        "transformers generate, first token": [sys.executable, "-c", THEIRS, directory, PROMPT, threads],
    }
    runs: dict[str, Callable[[], float]] = {
        name: partial(first_output_s, command) for name, command in commands.items()
    }
    figures = take_turns(runs, given.repeats)
    rows = [
        {"what": name, "s": round(median(figures[name]), 3), "lowest to highest s": spread(figures[name])}
        for name in commands
    ]
    show("Start", rows, machine(given.threads), given.json_file)
    show("First token of a large engine", large(given.repeats), machine(given.threads))


def large(repeats: int) -> list[dict[str, object]]:
    """A row for each way to start and state of the page cache; medians, and what a streaming start decided."""
    ways = {"all loaded, then run": {}, "streaming": {"residency": "streamed"}}
    rows: list[dict[str, object]] = []
    with big_checkpoint(BIG_BYTES) as directory:
        for is_cold in (False, True):
            found = {name: [] for name in ways}
            for round_number in range(repeats + 1):  # the first chooses operators, and does not count
                for name, options in ways.items():
                    figure = fresh(directory, options, "BF16", is_cold)
                    if round_number:
                        found[name].append(figure)
            for name, figures in found.items():
                first_s = [one["first_s"] for one in figures]
                said = {(one["residency"] or {}).get("start", "-") for one in figures}
                files = "disk" if is_cold else "page cache"
                rows.append(
                    {
                        "start": name,
                        "files": files,
                        "first token s": round(median(first_s), 3),
                        "lowest to highest s": spread(first_s),
                        "decided": " / ".join(sorted(said)),
                    }
                )
    return rows


if __name__ == "__main__":
    main()
