"""OpenAI's messages become a template's messages and a list of pictures."""

from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.messages import from_openai, refuse_lost, refuse_unread, user_turn, with_plain_text


def test_pictures_are_taken_out_in_order() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:1", "detail": "low"}},
                {"type": "text", "text": "t"},
                {"type": "image_url", "image_url": "data:2"},
                {"type": "image", "url": "data:3"},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    turned, urls = from_openai(messages)
    assert urls == ["data:1", "data:2", "data:3"]
    image = {"type": "image"}
    assert turned[1]["content"] == [image, {"type": "text", "text": "t"}, image, image]
    assert turned[0] == messages[0]
    assert turned[2]["content"] is None


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"content": "x"}, "messages[0]"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "weight": 2}]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:1", "crop": 4}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": [{"type": "video_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["text"]}, "messages[0].content[0]"),
    ],
)
def test_what_is_no_message_is_refused(message: dict[str, Any], where: str) -> None:
    with pytest.raises(Refused) as caught:
        from_openai([message])
    assert caught.value.findings[0].code == "bad-request"
    assert caught.value.findings[0].message.startswith(where)


def test_what_a_template_never_looks_at_is_refused() -> None:
    called = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}], "name": None}
    refuse_unread([called], "{{ message.tool_calls }}")
    refuse_unread([{"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "hm"}], "")
    with pytest.raises(Refused, match=r"messages\[1\].tool_calls"):
        refuse_unread([{"role": "user", "content": "a"}, called], "{{ message.content }}")


def test_a_turn_is_pictures_then_text() -> None:
    assert user_turn("t", 0, parts=False) == {"role": "user", "content": "t"}
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "t"}]
    assert user_turn("t", 2, parts=True) == {"role": "user", "content": parts}


def test_only_texts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    mixed = [{"type": "image"}, {"type": "text", "text": "b"}]
    joined = with_plain_text(
        [{"role": "u", "content": parts}, {"role": "u", "content": mixed}, {"role": "u", "content": "c"}]
    )
    assert [message["content"] for message in joined] == ["a\nb", mixed, "c"]


def test_a_message_that_a_template_leaves_out_is_refused() -> None:
    """A system message, say, that a template for users and assistants skips without a word."""
    system = {"role": "system", "content": [{"type": "text", "text": "Answer in rhymes.\n\nAlways."}]}
    user = {"role": "user", "content": "  How are you?  "}
    refuse_lost([system, user], "<s>Answer in rhymes. Always.\nUSER: How are you?\nASSISTANT:")
    refuse_lost([{"role": "assistant", "content": "<think>no</think>yes"}, user], "yes\nUSER: How are you?")
    refuse_lost([{"role": "user", "content": ""}, {"role": "user", "content": []}], "")
    with pytest.raises(Refused, match=r"messages\[0\] of role system cannot be used") as caught:
        refuse_lost([system, user], "USER: How are you?\nASSISTANT:")
    assert "Answer in rhymes." in str(caught.value)
