"""Rendered prompts equal those of transformers' apply_chat_template, and templates stay in their sandbox."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.chat_template import ChatTemplate
from tests.engine.inputs.toys import CHATML, TEXT_CHATML, write_json

TURN = [{"role": "user", "content": "What does a cow say? ünï 🫠 <b>&amp;</b>"}]
TALK = [
    {"role": "system", "content": "Be short."},
    *TURN,
    {"role": "assistant", "content": "moo", "thinking": "a cow", "tool_calls": None},
    {"role": "user", "content": "And a cat?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "ü": "<"}}}]
TEMPLATES = {
    "chatml": CHATML,
    "bos and trim": TEXT_CHATML,
    "trimmed blocks": "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\nx",
    "tojson": "{{ tools | tojson(indent=2) }}{{ messages | tojson }}{{ {'b': 1, 'a': 'é<'} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% if loop.index > 3 %}"
    "{% break %}{% endif %}{{ m.role }},{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "namespace and dict": "{% set ns = namespace(last='', n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.last }}{{ ns.n }}{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.tool_calls is defined }};"
    "{% endfor %}",
    "variables": "{{ enable_thinking }}{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}"
    "{{ eos_token }}",
    "macro": "{% macro turn(m) %}[{{ m.role | upper }}: {{ m['content'][:4] }}]{% endmacro %}"
    "{% for m in messages if m.role != 'system' %}{{ turn(m) }}{% endfor %}{{ messages[1:][0].role }}",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [TURN, TALK], ids=["turn", "talk"])
def test_texts_equal_transformers(toys: Path, name: str, messages: list[dict[str, Any]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toys / "text")
    tokenizer.chat_template = TEMPLATES[name]
    if name == "macro" and messages is TURN:
        messages = [*TURN, *TURN]
    variables = {"tools": TOOLS, "enable_thinking": False}
    for generation in (True, False):
        theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **variables)
        ours = ChatTemplate(TEMPLATES[name], toys / "text", tokenizer.special_tokens_map)
        assert ours.render(messages, generation, **variables) == theirs


def test_the_date_is_today() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", Path("x"), {})
    today = datetime.datetime.now().astimezone().date()
    assert template.render(TURN) in (str(today), str(today + datetime.timedelta(days=1)))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ dict.__call__.__func__.__globals__ }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_template_stays_in_its_sandbox(attack: str) -> None:
    with pytest.raises(Refused) as caught:
        ChatTemplate(attack, Path("chat_template.jinja"), {}).render(TURN)
    assert caught.value.findings[0].code == "bad-request"


def test_a_template_sees_plain_data_only() -> None:
    picture = object()
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}]}]
    text = ChatTemplate("{{ messages[0].content[0].image }}", Path("x"), {}).render(messages)
    assert text == "<object>"


def test_a_template_that_refuses_is_quoted() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", Path("chat_template.jinja"), {})
    with pytest.raises(Refused, match="roles must alternate"):
        template.render(TALK)


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        ChatTemplate("{% for %}", Path("chat_template.jinja"), {}).render(TURN)
    assert caught.value.findings[0].code == "side-file-invalid"


@pytest.mark.parametrize(
    "value", [5, ["a"], [{"name": "default"}], [{"name": [], "template": ""}], {"default": 5}, [[]]]
)
def test_templates_that_are_no_texts_are_refused(copy_of: Callable[[str], Path], value: Any) -> None:
    directory = copy_of("text")
    (directory / "chat_template.jinja").unlink()
    write_json(directory / "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(Refused) as caught:
        ChatTemplate.open(directory)
    finding = caught.value.findings[0]
    assert (finding.code, finding.file) == ("side-file-invalid", str(directory / "tokenizer_config.json"))


def test_the_order_of_sources_for_a_tokenizer(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("text")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    write_json(directory / "tokenizer_config.json", {**config, "chat_template": "from the configuration"})
    write_json(directory / "chat_template.json", {"chat_template": "of a processor"})
    for expected in ("chat_template.jinja", "tokenizer_config.json"):
        ours = ChatTemplate.open(directory)
        theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(TURN, tokenize=False)
        assert ours.render(TURN, add_generation_prompt=False) == theirs
        assert ours.file == directory / expected
        (directory / "chat_template.jinja").unlink(missing_ok=True)
    write_json(directory / "tokenizer_config.json", config)
    with pytest.raises(Refused) as caught:
        ChatTemplate.open(directory)
    assert caught.value.findings[0].code == "missing-side-file"


@pytest.mark.filterwarnings("ignore")
def test_the_order_of_sources_for_a_processor(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("vlm")
    processor_config = json.loads((directory / "processor_config.json").read_text())
    write_json(directory / "chat_template.json", {"chat_template": "of chat_template.json"})
    write_json(directory / "processor_config.json", {**processor_config, "chat_template": "of processor_config.json"})
    for name in ("processor_config.json", "chat_template.json", "chat_template.jinja"):
        ours = ChatTemplate.open(directory, processor=True)
        assert ours.file == directory / name
        theirs = AutoProcessor.from_pretrained(directory).apply_chat_template([TURN], tokenize=False)[0]
        assert ours.render(TURN, add_generation_prompt=False) == theirs
        if name == "processor_config.json":
            write_json(directory / name, processor_config)
        else:
            (directory / name).unlink()


def test_several_templates(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("text")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_json(directory / "tokenizer_config.json", {**config, "chat_template": templates})
    (directory / "chat_template.jinja").unlink()
    template = ChatTemplate.open(directory)
    assert (template.render(TURN), template.names) == ("d", ("tool_use",))
    write_json(directory / "tokenizer_config.json", {**config, "chat_template": templates[1:]})
    with pytest.raises(Refused, match="none is the default"):
        ChatTemplate.open(directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("r")
    (directory / "chat_template.jinja").write_text("j")
    template = ChatTemplate.open(directory)
    assert (template.render(TURN), template.names) == ("j", ("rag",))


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        (CHATML, True, True),
        (TEXT_CHATML, True, False),
        ("{% for m in messages %}{{ m.content + '!' }}{% endfor %}", True, False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True, False),
        ("{{ messages | tojson }}", True, False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", False, True),
    ],
)
def test_what_a_template_does_with_content(source: str, text: bool, parts: bool) -> None:
    template = ChatTemplate(source, Path("x"), {"bos_token": "<s>"})
    assert (template.takes_text, template.takes_parts) == (text, parts)


def doubling(first: str, step: str) -> str:
    return "{% set n = namespace(x=" + first + ") %}{% for i in range(60) %}" + step + "{% endfor %}{{ n.x }}"


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{{ 3 ** (10 ** 8) }}",
    "repeat": "{{ 'a' * 10 ** 11 }}",
    "repeat a list": "{{ ([1] * 10 ** 11) | length }}",
    "joined text": doubling("'ab'", "{% set n.x = n.x ~ n.x %}"),
    "added text": doubling("'ab'", "{% set n.x = n.x + n.x %}"),
    "replaced text": doubling("'aa'", "{% set n.x = n.x.replace('a', 'aa') %}"),
    "joined by itself": doubling("'aa'", "{% set n.x = ['', '', ''] | join(n.x) %}"),
    "captured text": doubling("'ab'", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "nested lists": doubling("[1]", "{% set n.x = [n.x, n.x] %}"),
    "nested dicts": doubling("{}", "{% set n.x = dict(a=n.x, b=n.x) %}"),
    "padding": "{{ 'a'.ljust(10 ** 11) }}",
    "padding filter": "{{ 'a' | center(10 ** 11) }}",
    "width": "{{ '%100000000000d' % 1 }}",
    "width of format": "{{ '{:>100000000000}'.format(1) }}",
    "width of an argument": "{{ '{:{}}'.format(1, 100000000000) }}",
    "width of a date": "{{ strftime_now('%999999999Y') }}",
    "filler": "{{ lipsum(100000, true, 10000, 100000) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_computes_no_more_than_it_may(name: str) -> None:
    with pytest.raises(Refused):
        ChatTemplate(ENDLESS[name], Path("x"), {}).render(TURN)


def test_the_bounds_leave_room_for_long_conversations() -> None:
    """Hundreds of turns, each of which looks at all of them; and every rendering has the whole budget."""
    source = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content | trim }}"
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length > 9 %};{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, Path("x"), {})
    for _ in range(3):
        assert template.render(TURN * 400).endswith(";")
