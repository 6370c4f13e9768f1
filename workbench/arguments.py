"""Parsing: options that every verb has, a configuration file under them, and refusals that name the nearest word."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal, is_text, printable
from firstlight.workbench.cli import VERBS, Command, load_command

# Sections of a configuration file, and the option that each of their keys sets.
SECTIONS: dict[str, dict[str, str]] = {
    "mesh": {name: name for name in ("tp", "pp", "ep", "sp", "dp", "attention")},
    "cache": {"dtype": "cache_dtype", "page_size": "page_size", "num_pages": "num_pages"},
    "limits": {
        "max_context": "max_context",
        "max_batch": "max_batch",
        "token_budget": "token_budget",
        "max_new_tokens": "max_new_tokens",
        "threads": "threads",
        "residency": "residency",
        "weights_budget": "weights_budget",
        "packed": "packed",
    },
}
# What a value is by the word that stands for it in the help, where one without a letter means nothing.
NEVER_EMPTY: Mapping[str, str] = {
    **dict.fromkeys(("CKPT", "CKPT|FACTS", "RUN", "NOTEBOOK", "FILE", "DIR"), "a path"),
    "H": "an address",
    "T": "a token",
    "NAME": "a name",
}
NOT_IN_FILES = frozenset({"config", "help", "json", "run", "quiet", "ended_run"})


class Help(argparse.HelpFormatter):
    """Help that names an option's default where its text does not."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_said = not action.option_strings or isinstance(default, bool | list) or "default" in text
        return text if is_said or default in (None, argparse.SUPPRESS) else f"{text} (default %(default)s)"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are refusals."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Help, **options})

    def error(self, message: str) -> NoReturn:
        raise Refused(
            fatal("usage", f"{self.prog}: {message}", next=f"{self.prog} --help tells what there is")
        ) from None

    def print_help(self, file: Any = None) -> None:
        """Says at once where nothing can be written; argparse would not."""
        print(self.format_help(), end="", file=file, flush=True)

    @property
    def options(self) -> dict[str, argparse.Action]:
        """Every option by the name of its value."""
        return {action.dest: action for action in self._actions}

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(self._option_string_actions)


def parse(verb: str, command: Command, words: Sequence[str]) -> argparse.Namespace:
    """The verb's arguments: flags first, then the configuration file, then defaults. Raises `Refused`."""
    _refuse_bytes(words)
    parser = parser_of(verb, command)
    file = value_of("--config", words)
    if file is not None:
        _take_over(parser, file, read_config(file))
    parsed, left = parser.parse_known_args(list(words))
    for word in left:
        if word.startswith("-") and word != "-":
            refuse_unknown("option", word.partition("=")[0], parser.flags, f"firstlight {verb} --help lists them")
    if left:
        parser.error(f"{left[0]!r} is one argument too many")
    _refuse_empty(parser, parsed)
    parsed.words = tuple(words)
    return parsed


def stated(verb: str, words: Sequence[str]) -> frozenset[str]:
    """Options that words or their configuration file name, be it with the default: what they say comes first."""
    command = load_command(verb)
    parser = parser_of(verb, command)
    file = value_of("--config", words)
    of_file = {name for name, value in read_config(file).items() if value is not None} if file is not None else set()
    for action in parser.options.values():
        action.default = argparse.SUPPRESS
        action.required = False
    return frozenset(vars(parser.parse_known_args(list(words))[0])) | (of_file & parser.options.keys())


def parser_of(verb: str, command: Command) -> Parser:
    """The verb's parser, with the options that every verb has."""
    parser = Parser(prog=f"firstlight {verb}", description=VERBS[verb][:1].upper() + VERBS[verb][1:] + ".")
    command.arguments(parser)
    common = parser.add_argument_group("for every verb")
    common.add_argument("--json", metavar="FILE", help="write the report as JSON; - for standard output")
    common.add_argument("--run", metavar="DIR", help="append the report to this run directory")
    common.add_argument("-q", "--quiet", action="store_true", help="print nothing but refusals")
    common.add_argument("--config", metavar="FILE", help="YAML with values of these options; flags win")
    common.add_argument(
        "--force", action="store_true", help="go on above a rung that did not pass; the record shows it"
    )
    return parser


def read_config(path: str) -> dict[str, Any]:
    """A configuration file as option -> value; unknown keys are refused with the nearest name."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's safe part, in which a key that stands twice is an error: one of the two would count for nothing."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        raw = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise Refused(
            fatal(
                "not-found",
                f"{path} cannot be read: {error.strerror}",
                file=path,
                expected="a YAML file",
                found=error.strerror or str(error),
                next="name another --config file",
            )
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Refused(
            fatal("usage", f"{path} is not YAML: {' '.join(str(error).split())}", file=path, next="correct the file")
        ) from error
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise Refused(
            fatal(
                "usage",
                f"{path} holds no settings",
                file=path,
                expected="key: value",
                found=type(raw).__name__,
                next="write one option a line, by its name: dtype: bf16",
            )
        )
    return _settings(path, raw)


def refuse_unknown(what: str, word: str, known: Iterable[str], next: str, file: str | None = None) -> NoReturn:
    """Refuses a word that nobody knows, with the nearest ones."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=2, cutoff=0.5)
    where = f" in {file}" if file else ""
    raise Refused(
        fatal(
            "usage",
            f"unknown {what} {word!r}{where}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
            file=file,
            expected=" or ".join(near) if near else ", ".join(names) if len(names) < 20 else None,
            found=word,
            next=next,
        )
    )


def value_of(option: str, words: Sequence[str]) -> str | None:
    """What words say for one option, before a verb's own parser looks at them; None also where they say it wrongly."""
    first = Parser(add_help=False)
    first.add_argument(option, dest="value")
    try:
        value: str | None = first.parse_known_args([word for word in words if word not in ("-h", "--help")])[0].value
    except Refused:
        return None  # the verb's own parser says what is wrong
    return value


def _refuse_empty(parser: Parser, parsed: argparse.Namespace) -> None:
    """Refuses what a variable leaves that is not set: as a path it would mean this directory, as a token none."""
    for action in parser._actions:
        value, word = getattr(parsed, action.dest, None), str(action.metavar)
        if word in NEVER_EMPTY and "" in (value if isinstance(value, list) else [value]):
            name = action.option_strings[-1] if action.option_strings else word
            parser.error(f"{name} is empty: {NEVER_EMPTY[word]} was expected")


def _refuse_bytes(words: Sequence[str]) -> None:
    """Refuses words that are no text: they could be neither told on to another process nor written in a report."""
    for word in words:
        if not is_text(word):
            raise Refused(
                fatal(
                    "usage",
                    f"{printable(word)} is not UTF-8",
                    expected="text, or a path whose name is text",
                    found=printable(word),
                    next="correct it; a directory can be given another name, or a link to it",
                )
            )


def _flatten(path: str, raw: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    known = _known_options()
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name in SECTIONS:
            if value is not None and not isinstance(value, Mapping):
                _refuse_value(path, str(key), f"keys {', '.join(SECTIONS[name])}", value)
            for inner, inner_value in (value or {}).items():
                if str(inner) not in SECTIONS[name]:
                    refuse_unknown(f"key {key}:", str(inner), SECTIONS[name], f"correct {path}", path)
                yield SECTIONS[name][str(inner)], inner_value
        elif name in known:
            yield name, value
        else:
            refuse_unknown("key", str(key), (*SECTIONS, *sorted(known)), f"correct {path}", path)


def _settings(path: str, raw: Mapping[Any, Any]) -> dict[str, Any]:
    """Option -> value, each stated once and of a kind that some verb takes."""
    known, values = _known_options(), dict[str, Any]()
    for name, value in _flatten(path, raw):
        if name in values:
            _refuse_value(path, name, "one value", f"{values[name]!r} and {value!r}, in a section and outside or so")
        if value is not None and name in known:
            _converted(path, name, known[name], value)
        values[name] = value
    return values


def _known_options() -> dict[str, argparse.Action]:
    """Options of all verbs: one file may serve several verbs, each of which takes what it has."""
    known: dict[str, argparse.Action] = {}
    for verb in VERBS:
        known = parser_of(verb, load_command(verb)).options | known
    return {name: action for name, action in known.items() if name not in NOT_IN_FILES}


def _take_over(parser: Parser, path: str, values: Mapping[str, Any]) -> None:
    """Makes the file's values the parser's defaults, checked as flags are."""
    for name, value in values.items():
        action = parser.options.get(name)
        if action is None or value is None:
            continue
        parser.set_defaults(**{name: _converted(path, name, action, value)})
        action.required = False


def _converted(path: str, name: str, action: argparse.Action, value: Any) -> Any:
    if isinstance(action, argparse._StoreTrueAction):
        if not isinstance(value, bool):
            _refuse_value(path, name, "true or false", value)
        return value
    if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction):
        items = value if isinstance(value, list) else [value]
        return [_one(path, name, action, item) for item in items]
    return _one(path, name, action, value)


def _one(path: str, name: str, action: argparse.Action, value: Any) -> Any:
    if isinstance(value, Mapping | bool) or (isinstance(value, list) and action.nargs is None):
        if isinstance(value, list):  # device ids and the like are written with commas as a flag
            value = ",".join(str(item) for item in value)
        else:
            _refuse_value(path, name, "one value", value)
    convert = action.type if callable(action.type) else str
    try:
        converted = convert(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        _refuse_value(path, name, str(error).partition(" is not ")[2] or str(error), value)
    if action.choices is not None and converted not in action.choices:
        _refuse_value(path, name, ", ".join(map(str, action.choices)), value)
    return converted


def _refuse_value(path: str, name: str, expected: str, value: Any) -> NoReturn:
    raise Refused(
        fatal(
            "usage",
            f"{path}: {name} has a value that cannot be used",
            file=path,
            expected=expected,
            found=repr(value),
            next=f"correct {name} in {path}",
        )
    )
