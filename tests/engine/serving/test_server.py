"""HTTP as clients see it: the openai package, errors, limits, streams that break off, and many at once."""

import asyncio
import base64
import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.tokenizer import Tokenizer
from firstlight.engine.serving.desk import Desk
from firstlight.engine.serving.health import Pulse
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.options import HostOptions
from firstlight.engine.serving.request import Delta, SamplingParams
from firstlight.engine.serving.runtime import Engine
from tests.engine.serving.conftest import MENAGERIE, PICTURES
from tests.waiting import PATIENCE_S, until

MODEL = "menagerie"


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png(image: Image.Image) -> bytes:
    stream = BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def picture_turn(url: str, text: str = "What animal is this?") -> list[Any]:
    return [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]}
    ]


CAT = data_url((PICTURES / "cat.png").read_bytes())


@pytest.fixture
def client(host: Host) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{host.url}/v1", api_key=host.token, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def raw(host: Host) -> Iterator[httpx.Client]:
    key = {"Authorization": f"Bearer {host.token}"}
    with httpx.Client(base_url=host.url, headers=key, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def single() -> Iterator[Engine]:
    """The same model on one rank in this process."""
    engine = Engine.start(str(MENAGERIE), dtype="F32", max_context=160, threads=1)
    yield engine
    engine.close()


def test_models_lists_the_one(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.models.retrieve("other")


def test_a_picture_question_is_answered_as_on_one_rank(client: openai.OpenAI, single: Engine) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=picture_turn(CAT), max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    wanted = single.complete(
        "What animal is this?", [PICTURES / "cat.png"], SamplingParams(max_new_tokens=12, logprobs=True, top_logprobs=3)
    )
    choice = answer.choices[0]
    assert choice.message.content == wanted.text
    assert choice.finish_reason == wanted.finish
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == wanted.usage.prompt_tokens
    assert answer.usage.completion_tokens == len(wanted.tokens)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for found, ours in zip(choice.logprobs.content, wanted.logprobs, strict=True):
        assert found.logprob == pytest.approx(ours.logprob, abs=1e-3)
        assert len(found.top_logprobs) == 3
        assert found.bytes == list(single.frontend.token_bytes(ours.token))


def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": picture_turn(CAT), "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What does a cow say?"}],
            max_tokens=24,
            temperature=1.5,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].message.content

    assert ask(11) == ask(11)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, single: Engine) -> None:
    prompt = "What does a cow say?"
    wanted = single.complete(prompt, params=SamplingParams(max_new_tokens=24, ignore_eos=True), chat=False).text
    stop = wanted[len(wanted) // 2 :][:4]
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stop=[stop], extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == wanted[: wanted.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    held: list[int] = []

    def listener(delta: Delta) -> None:
        if delta.finish is not None:
            held.append(single.scheduler.num_running)

    single.submit(prompt, (), SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop,)), False, listener)
    while single.step():
        pass
    assert held == [0], "who has the answer finds that it holds nothing any more"


def test_completions_take_token_ids_and_give_log_probabilities(client: openai.OpenAI, single: Engine) -> None:
    ids = single.frontend.processor.tokenizer.encode("A cow says", add_special_tokens=False)
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=3, temperature=0, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == single.complete(ids, params=SamplingParams(max_new_tokens=3)).text
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == answer.usage.completion_tokens  # type: ignore[union-attr]


def test_an_answer_without_a_limit_ends_at_the_context(client: openai.OpenAI) -> None:
    ids = [5] * 100
    answer = client.completions.create(model=MODEL, prompt=ids, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == 160
    assert answer.choices[0].finish_reason == "length"


def test_deltas_are_whole_characters_whatever_the_tokens(single: Engine) -> None:
    """High temperature over a byte-level vocabulary: many tokens are pieces of characters."""
    tokenizer = Tokenizer.open(MENAGERIE)
    for seed in range(6):
        params = SamplingParams(max_new_tokens=60, temperature=4.0, seed=seed, ignore_eos=True)
        deltas = list(single.generate("Say anything.", params=params))
        tokens = [token for delta in deltas for token in delta.tokens]
        text = "".join(delta.text for delta in deltas)
        assert text == tokenizer.decode(tokens)
        assert all("\ufffd" not in delta.text or "\ufffd" in text for delta in deltas)


BAD_PICTURES: dict[str, tuple[Callable[[], str], str]] = {
    "truncated": (lambda: data_url(png(Image.effect_noise((64, 64), 80))[:200]), "bad-image"),
    "text": (lambda: data_url(b"not a picture"), "bad-image"),
    "too many pixels": (lambda: data_url(png(Image.new("1", (12000, 6000)))), "pixels"),
    "http": (lambda: "http://localhost/cat.png", "data:"),
    "a file": (lambda: str(PICTURES / "cat.png"), "data:"),
}


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_bad_picture_is_400_and_others_are_unaffected(client: openai.OpenAI, name: str) -> None:
    make, message = BAD_PICTURES[name]
    good: dict[str, Any] = {"model": MODEL, "messages": picture_turn(CAT), "max_tokens": 12, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: client.chat.completions.create(**good))
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=picture_turn(make()), max_tokens=4)
        assert (
            beside.result().choices[0].message.content
            == client.chat.completions.create(**good).choices[0].message.content
        )
    assert message in caught.value.message
    assert "expected:" in caught.value.message
    assert "found:" in caught.value.message


def odd_pictures() -> dict[str, str]:
    """Pictures that are unusual and still pictures."""
    hidden = Image.effect_noise((40, 30), 90).convert("RGBA")
    hidden.putalpha(0)
    frames = [Image.new("P", (20, 20), colour) for colour in range(3)]
    animated = BytesIO()
    frames[0].save(animated, format="GIF", save_all=True, append_images=frames[1:])
    return {
        "one pixel": data_url(png(Image.new("RGB", (1, 1)))),
        "wide": data_url(png(Image.new("L", (500, 2)))),
        "tall": data_url(png(Image.new("RGB", (1, 10000)))),
        "noise under alpha 0": data_url(png(hidden)),
        "grey of 16 bits": data_url(png(Image.new("I;16", (30, 30), 30000))),
        "animated": data_url(animated.getvalue()),
    }


def test_odd_pictures_are_seen_or_refused_but_never_left_out(raw: httpx.Client) -> None:
    def ask(url: str) -> httpx.Response:
        body = {"model": MODEL, "messages": picture_turn(url), "max_tokens": 2, "temperature": 0}
        return raw.post("/v1/chat/completions", json=body)

    tokens = ask(CAT).json()["usage"]["prompt_tokens"]
    for name, url in odd_pictures().items():
        answer = ask(url)
        assert answer.status_code in (200, 400), f"{name}: {answer.text}"
        if answer.status_code == 200:
            assert answer.json()["usage"]["prompt_tokens"] == tokens, name
        else:
            assert "expected:" in answer.json()["error"]["message"], name


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model": "gpt-4"}, 404, "menagerie"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "text or image_url"),
        ({"n": 2}, 400, "n cannot be served"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"temprature": 1}, 400, "unknown key"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 4000}, 400, "160 tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"stop": [""]}, 400, "stop"),
    ],
)
def test_errors_are_openai_errors(raw: httpx.Client, change: dict[str, Any], code: int, message: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2} | change
    answer = raw.post("/v1/chat/completions", json=body)
    assert answer.status_code == code, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_bodies_are_bounded(raw: httpx.Client) -> None:
    huge = b"x" * (2 << 20)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(huge), 1 << 16):
            yield huge[start : start + (1 << 16)]

    for content in (huge, pieces()):  # announced, and not
        answer = raw.post("/v1/chat/completions", content=content)
        assert answer.status_code == 413
        assert "1048576" in answer.json()["error"]["message"]
    assert raw.post("/v1/chat/completions", content=b"{").status_code == 400
    assert raw.get("/v1/nothing").status_code == 404
    assert raw.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"


def test_the_token_is_checked(host: Host) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"bearer{host.token}"}):
        for path in ("/v1/models", "/admin/ledger", "/admin/memory"):
            answer = httpx.get(host.url + path, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    health = httpx.get(f"{host.url}/health", timeout=PATIENCE_S)
    assert health.status_code == 200
    assert "ranks" not in health.json()


def test_a_client_that_leaves_frees_its_pages(host: Host, raw: httpx.Client) -> None:
    """A crowd that was held up until the engine had answered it left nothing: another one comes."""
    before, abandoned, has_left = host.client().stats().requests, 0, False
    for crowds in range(1, 11):
        has_left |= come_and_leave(raw)
        until(lambda: idle(host), "the requests of clients that left still run")
        ended = {reason: count - before[reason] for reason, count in host.client().stats().requests.items()}
        assert ended["abort"] + ended["length"] == sum(ended.values())
        assert 48 * crowds <= sum(ended.values()) <= 49 * crowds, "the last one may have left before it was heard"
        if has_left and ended["abort"] - abandoned > 16:
            return
        abandoned = ended["abort"]
    pytest.fail("more than a batch is not answered to its end where 48 leave")


def come_and_leave(raw: httpx.Client) -> bool:
    """Three times as many as run at once, and a request: whether that one left before it was answered."""
    body = {"model": MODEL, "prompt": "Tell me", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    with ExitStack() as streams:
        crowd = [raw.stream("POST", "/v1/completions", json=body | {"stream": True}) for _ in range(48)]
        answers = [streams.enter_context(one) for one in crowd]
        next(answers[0].iter_lines())
    try:
        raw.post("/v1/completions", json=body, timeout=httpx.Timeout(PATIENCE_S, read=0.05))
    except httpx.ReadTimeout:
        return True
    return False


def idle(host: Host) -> bool:
    stats = host.client().stats()
    return (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.num_pages)


def test_the_engine_is_the_same_over_http(host: Host, single: Engine) -> None:
    client = host.client()
    params = SamplingParams(max_new_tokens=6, logprobs=True, top_logprobs=2)
    ours = single.complete("What animal is this?", [PICTURES / "dog.png"], params)
    theirs = client.complete("What animal is this?", [PICTURES / "dog.png"], params)
    assert theirs.tokens == ours.tokens
    assert theirs.text == ours.text
    ids = np.array([[7, 8, 9, 10], [0, 0, 11, 12]])
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
    here = single.trace(ids, mask, steps=3)
    there = client.trace(ids, mask, steps=3)
    assert here.keys() == there.keys()
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, atol=1e-4 * np.abs(value).max(), err_msg=name)
    given = {"hidden.1": here["hidden.1"]}
    forced = client.trace(ids, mask, inputs=given, layers=(1, 2))
    assert list(forced) == ["hidden.2"]
    with pytest.raises(Refused, match="bad-golden"):
        client.trace(ids, mask, inputs={"hidden.99": here["hidden.1"]})
    with pytest.raises(Refused) as caught:
        client.complete("x", [b"no picture"])
    assert caught.value.findings[0].code == "bad-image"


def test_admin_routes_tell_what_runs(host: Host, single: Engine) -> None:
    client = host.client()
    info = client.info()
    assert (info.mesh.tp, info.dtype, info.sees, info.model) == (2, "F32", True, MODEL)
    assert {operator for operator, _, chosen, _ in info.operators if chosen} >= {"attention", "linear", "rms_norm"}
    assert client.ledger() == single.ledger()
    memory = client.memory()
    assert [one.rank for one in memory] == [0, 1]
    profiles = client.profile(prompt_tokens=16, decode_steps=3, batch=2)
    assert [one.rank for one in profiles] == [0, 1]
    layers = info.num_layers
    assert profiles[0].decode.collectives["all_reduce tp"] == 2 * layers + 1  # two a layer, and the embedding
    assert profiles[0].decode.communication_bytes > 0
    beats = {beat.rank: beat for beat in client.health().ranks}
    assert beats[1].stage == "ready"


def test_what_was_served_is_counted_and_exposed(host: Host, raw: httpx.Client) -> None:
    client = host.client()
    before = client.stats()
    done = client.complete("what is a cow", params=SamplingParams(max_new_tokens=70, ignore_eos=True))
    after = client.stats()
    assert after.generated_tokens - before.generated_tokens == 70 == done.usage.completion_tokens
    assert after.prompt_tokens - before.prompt_tokens == done.usage.prompt_tokens
    assert after.requests["length"] == before.requests["length"] + 1
    assert (after.running, after.waiting, after.free_pages) == (0, 0, after.num_pages)
    assert after.step - before.step >= 70
    assert 0 < after.busy_s - before.busy_s < after.time_s - before.time_s
    sample = after.sample
    assert sample is not None, "more steps than between two samples have passed"
    assert {f"layers.{i}.ffn" for i in range(client.info().num_layers)} < set(sample.layers_ms)
    (reduce,) = (one for one in sample.collectives if (one.axis, one.operation) == ("tp", "all_reduce"))
    assert reduce.calls == 1 + 2 * client.info().num_layers, "one for the embedding, two a layer"
    assert 0 < reduce.total_ms < sample.total_ms
    text = raw.get("/metrics").text
    assert f'firstlight_generated_tokens_total{{model="menagerie"}} {float(after.generated_tokens)}' in text
    assert 'firstlight_sampled_collective_seconds{axis="tp",model="menagerie",operation="all_reduce"}' in text
    assert "# TYPE firstlight_requests_running gauge" in text


def test_a_trace_whose_answer_would_not_fit_is_refused(host: Host) -> None:
    with pytest.raises(Refused, match="a trace of 20,000 positions would be"):
        host.client().trace(np.zeros((200, 100), dtype=np.int64))


def test_a_trace_that_would_hold_up_the_engine_is_refused(host: Host) -> None:
    with pytest.raises(Refused, match="70,000 positions is too long for a served engine"):
        host.client().trace(np.zeros((70_000, 1), dtype=np.int64), layers=(0, 1))


def test_a_canary_stays_in_its_own_cage(host: Host) -> None:
    """64 requests at once, each with a word of its own, some with pictures, some leaving early.

    Every answer is what the request gets alone, and no word shows up in another's answer.
    """
    url, headers = f"{host.url}/v1/chat/completions", {"Authorization": f"Bearer {host.token}"}
    canaries = [f"Q{index:02d}zx{index * 7919 % 997:03d}" for index in range(64)]

    def body(index: int) -> dict[str, Any]:
        text = f"{canaries[index]} {canaries[index]} what animal is {canaries[index]}?"
        messages = picture_turn(CAT, text) if index % 4 == 0 else [{"role": "user", "content": text}]
        return {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}

    async def ask(client: httpx.AsyncClient, index: int) -> str:
        if index % 8 == 5:  # leaves in the middle of a stream, then comes back
            async with client.stream("POST", url, json=body(index) | {"stream": True}) as answer:
                await anext(answer.aiter_lines())
        answer = await client.post(url, json=body(index))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def all_of_them() -> tuple[list[str], list[str]]:
        limits = httpx.Limits(max_connections=80)
        async with httpx.AsyncClient(headers=headers, timeout=PATIENCE_S, limits=limits) as client:
            crowd = await asyncio.gather(*(ask(client, index) for index in range(64)))
            alone = [await ask(client, index) for index in range(0, 64, 9)]
        return list(crowd), alone

    crowd, alone = asyncio.run(all_of_them())
    assert crowd[::9] == alone
    for index, answer in enumerate(crowd):
        others = [canary for other, canary in enumerate(canaries) if other != index and canary in answer]
        assert not others, f"answer {index} holds {others}"
    until(lambda: idle(host), "requests of those who left are still there")


def test_chunks_are_json_events(raw: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "A", "max_tokens": 3, "stream": True, "ignore_eos": True}
    with raw.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


HOSTILE = {
    "nested deeper than any parser goes": ("/v1/completions", b"[" * 200_000),
    "nested in a key that is ignored": ("/v1/completions", b'{"model":"menagerie","user":' + b'{"a":' * 100_000),
    "text among token ids": ("/v1/completions", {"prompt": [1, "a"]}),
    "digits among token ids": ("/v1/completions", {"prompt": [1, "2"]}),
    "pictures beside token ids": ("/v1/completions", {"prompt": [1, 2], "images": [CAT]}),
    "no tokens wanted": ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    "no tokens wanted of a chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
    ),
    "a message among token ids": ("/admin/generate", b'{"prompt":[1,{}]}'),
    "token ids among messages": ("/admin/generate", b'{"prompt":[{"role":"user","content":"a"},1]}'),
    "no messages": ("/admin/generate", b'{"prompt":[]}'),
    "a profile of less than nothing": ("/admin/profile?prompt_tokens=-1", b""),
    "a profile of nothing": ("/admin/profile?batch=0", b""),
    "a profile of everything": ("/admin/profile?prompt_tokens=1000000000", b""),
    "a profile of many": ("/admin/profile?batch=1000000", b""),
    "a profile without end": ("/admin/profile?decode_steps=1000000000", b""),
    "a query that is no number": ("/admin/profile?batch=x", b""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_400_in_openais_words(raw: httpx.Client, name: str) -> None:
    path, asked = HOSTILE[name]
    body = asked if isinstance(asked, bytes) else json.dumps({"model": MODEL, "max_tokens": 2, **asked}).encode()
    answer = raw.post(path, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].keys() >= {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert raw.get("/health").status_code == 200


def test_a_long_prompt_does_not_silence_the_server(single: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """/health answers while a prompt is tokenized, as the watchers of a rank need it to: here it takes until then."""
    began, is_answered, told = threading.Event(), threading.Event(), queue.Queue[Any]()

    def encode(*_: object, **__: object) -> list[int]:
        began.set()
        return [5] * 200 if is_answered.wait(PATIENCE_S) else []

    monkeypatch.setattr(single.frontend.processor.tokenizer, "encode", encode)
    desk = Desk(Pulse(), HostOptions())
    desk.engine = single
    desk.open(told.put, told.put)
    with ExitStack() as ends:
        ends.callback(desk.close)
        client = ends.enter_context(httpx.Client(base_url=told.get(), timeout=2 * PATIENCE_S))
        pool = ends.enter_context(ThreadPoolExecutor(1))
        long = pool.submit(client.post, "/v1/completions", json={"model": MODEL, "prompt": "A cow says"})
        began.wait(PATIENCE_S)
        assert client.get("/health").status_code == 200
        is_answered.set()
        assert long.result().json()["error"]["code"] == "context-too-long"
