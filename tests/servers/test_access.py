"""API keys, what each key sees, and what web pages may do."""

import asyncio
import base64
import logging

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from pagedjax.async_engine import AsyncEngine
from servers import ServerConfig, create_app
from servers.app import ROUTES

COMPLETIONS = "/v1/completions"
ONE, TWO = {"Authorization": "Bearer key-one"}, {"Authorization": "Bearer key-two"}


@pytest.fixture
async def keyed(serve):
    return await serve(api_key=("key-one", "key-two"))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method}{route.path}")
async def test_every_route_but_health_wants_a_key(keyed, route):
    response = await keyed.request(route.method, route.path.replace("{model:.+}", "fake"))
    if route.path in ("/health", "/ping"):
        assert response.status == 200
    else:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "AuthenticationError"


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "//v1/models", "/v1/../v1/models", "/%761/models", "/HEALTH", "/health/"]
)
async def test_paths_that_look_like_others_want_a_key_too(keyed, path):
    reader, writer = await asyncio.open_connection(keyed.host, keyed.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b" 401 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "header",
    [
        "key-one",
        "Bearer key-on",
        "Bearer key-one2",
        "Bearer",
        "Bearer ",
        "Basic key-one",
        "Basic " + base64.b64encode(b"key-one:").decode(),
        "Token key-one",
        "Bearer \udcff",
        "Bearer key-one key-two",
    ],
)
async def test_anything_but_a_key_is_refused(keyed, header):
    assert (await keyed.get("/v1/models", headers={"Authorization": header})).status == 401


@pytest.mark.parametrize(
    "header", ["Bearer key-two", "bearer key-two", "Basic " + base64.b64encode(b"me:key-two").decode()]
)
async def test_each_key_opens_and_browsers_may_send_it_as_a_password(keyed, header):
    assert (await keyed.get("/v1/models", headers={"Authorization": header})).status == 200


async def test_a_key_can_come_from_the_environment(serve, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    client = await serve()
    assert (await client.get("/v1/models")).status == 401
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer hidden"})).status == 200


async def test_a_key_aborts_its_own_requests_only(keyed, fake):
    fake.gate.clear()
    body = {"prompt": "ab", "request_id": "same", "max_tokens": 2}
    mine, theirs = [asyncio.create_task(keyed.post(COMPLETIONS, json=body, headers=one)) for one in (ONE, TWO)]
    await fake.until(lambda: len(fake.added) == 2)
    answer = await keyed.post("/abort", json={"request_id": ["cmpl-same", "cmpl-none"]}, headers=ONE)
    assert await answer.json() == {"aborted": ["cmpl-same"]}
    aborted = await (await mine).json()
    assert aborted["choices"][0]["finish_reason"] == "abort"
    assert not theirs.done()
    answer = await keyed.post("/abort", json={"request_id": "cmpl-same"}, headers=ONE)
    assert await answer.json() == {"aborted": []}
    fake.gate.set()
    assert (await (await theirs).json())["choices"][0]["finish_reason"] == "length"


async def test_abort_ends_all_prompts_of_all_ones_own_requests(keyed, fake):
    fake.gate.clear()
    bodies = [{"prompt": ["a", "b"], "stream": True}, {"prompt": "c", "stream": True}]
    streams = [await keyed.post(COMPLETIONS, json=body, headers=ONE) for body in bodies]
    answer = await keyed.post("/abort", json={"all": True}, headers=ONE)
    assert len((await answer.json())["aborted"]) == 2
    for stream in streams:
        text = await stream.text()
        assert '"finish_reason":"abort"' in text
        assert text.endswith("data: [DONE]\n\n")
    assert sorted(fake.aborted) == sorted(added[0] for added in fake.added)


async def test_each_key_has_cached_prefixes_of_its_own(keyed, fake):
    for headers in (ONE, TWO, ONE):
        assert (await keyed.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 1}, headers=headers)).status == 200
    first, second, third = (added[4] for added in fake.added)
    assert first == third != second
    assert None not in (first, second)


async def test_the_engine_hears_whose_request_it_is_and_for_which_user(keyed, fake):
    for headers, fields in ((ONE, {}), (ONE, {"user": "u"}), (TWO, {"user": "u"})):
        await keyed.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 1, **fields}, headers=headers)
    (key, nobody), with_user, other = fake.clients
    assert (nobody, with_user, other[1]) == ("", (key, "u"), "u")
    assert key != other[0]


async def test_keys_share_prefixes_under_a_salt_that_both_name_but_cannot_name_anothers_own(keyed, fake):
    body = {"prompt": "ab", "max_tokens": 1}
    await keyed.post(COMPLETIONS, json=body, headers=ONE)
    own = fake.added[0][4]
    for salt in ("common", own):
        for headers in (ONE, TWO):
            await keyed.post(COMPLETIONS, json={**body, "cache_salt": salt}, headers=headers)
    salts = [added[4] for added in fake.added[1:]]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert own not in salts


async def test_without_keys_prefixes_are_everyones(http, fake):
    await http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 1})
    assert fake.added[0][4] is None


async def test_priorities_are_bounded_for_each_key(serve, fake):
    fake.config = type(fake.config)(model="fake", max_model_len=64, scheduling_policy="priority")
    client = TestClient(
        TestServer(create_app(AsyncEngine(fake), ServerConfig(api_key=("key-one", "key-two"), best_priority=(-5, 0))))
    )
    async with client:
        status = {
            (name, priority): (
                await client.post(COMPLETIONS, json={"prompt": "a", "priority": priority}, headers=headers)
            ).status
            for name, headers in (("one", ONE), ("two", TWO))
            for priority in (-6, -5, -1, 0, 7)
        }
    assert {key for key, value in status.items() if value == 400} == {
        ("one", -6),
        ("two", -6),
        ("two", -5),
        ("two", -1),
    }


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
async def test_a_name_that_was_pointed_at_this_machine_is_refused(http, host):
    response = await http.get("/v1/models", headers={"Host": host})
    assert response.status == 421
    assert "--allowed-hosts" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "10.0.0.7:80", "LOCALHOST"])
async def test_this_machines_names_and_addresses_are_fine(http, host):
    assert (await http.get("/v1/models", headers={"Host": host})).status == 200


async def test_a_probe_without_a_host_is_answered(http):
    reader, writer = await asyncio.open_connection(http.host, http.port)
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.close()


async def test_names_can_be_allowed_and_a_public_server_takes_all(serve):
    named = await serve(allowed_hosts=("llm.example",))
    assert (await named.get("/v1/models", headers={"Host": "LLM.example:8000"})).status == 200
    public = await serve(host="0.0.0.0")
    assert (await public.get("/v1/models", headers={"Host": "anything"})).status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "file://"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_pages_of_other_sites_are_refused(http, fake, origin, method):
    response = await http.request(method, COMPLETIONS, json={"prompt": "a"}, headers={"Origin": origin})
    assert response.status == 403
    assert "Access-Control-Allow-Origin" not in response.headers
    assert fake.added == []


async def test_the_servers_own_pages_may_use_it(http):
    origin = str(http.make_url("/")).rstrip("/")
    response = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers={"Origin": origin})
    assert response.status == 200
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_an_allowed_site_gets_its_preflight_and_its_answer(serve):
    client = await serve(allowed_origins=("https://app.example",), api_key=("key-one",))
    site = {"Origin": "https://app.example"}
    preflight = await client.options(COMPLETIONS, headers=site)
    assert (preflight.status, preflight.headers["Access-Control-Allow-Origin"]) == (204, "https://app.example")
    assert "Authorization" in preflight.headers["Access-Control-Allow-Headers"]
    refused = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=site)
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "https://app.example")
    answer = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=site | ONE)
    assert (answer.status, answer.headers["Vary"]) == (200, "Origin")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/health"])
async def test_every_answer_keeps_browsers_in_bounds(http, path):
    headers = (await http.get(path)).headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


async def test_no_log_line_holds_a_key_or_a_prompt(keyed, fake, caplog):
    """Whatever happens to a request: it is answered, refused or fails."""
    caplog.set_level(logging.DEBUG)
    secret, key = "my secret prompt", "Bearer key-one"
    fake.tokenizer.encode = lambda text, special: (_ for _ in ()).throw(ZeroDivisionError("broken"))
    for headers, body in ((ONE, {"prompt": secret}), (ONE, {"prompt": secret, "n": 0}), (TWO, {"prompt": [97] * 99})):
        await keyed.post(COMPLETIONS, json=body, headers=headers)
    await keyed.post(COMPLETIONS, json={"prompt": list(b"abc"), "stop": [secret], "max_tokens": 1}, headers=ONE)
    assert "a request failed" in caplog.text
    assert secret not in caplog.text
    assert key.split()[1] not in caplog.text


async def test_requests_are_logged_without_their_words_when_asked(serve, caplog):
    caplog.set_level(logging.INFO, logger="servers")
    client = await serve(enable_log_requests=True)
    body = {"prompt": "secret", "stop": ["secret"], "max_tokens": 3, "request_id": "a", "temperature": 0}
    await client.post(COMPLETIONS, json=body)
    assert "Received request cmpl-a: 6 prompt tokens, temperature=0.0, max_tokens=3" in caplog.text
    assert "Left request cmpl-a" in caplog.text
    assert "secret" not in caplog.text


async def test_a_slow_engine_is_a_slow_health_check_only_when_it_is_stuck(serve, fake):
    client = await serve(watchdog_timeout=0.05)
    fake.gate.clear()
    fake.step_seconds = 0.3
    async with ClientSession() as session:
        url = client.make_url(COMPLETIONS)
        running = asyncio.create_task(session.post(url, json={"prompt": "a", "max_tokens": 1}))
        while (await client.get("/health")).status != 503:
            pass
        fake.gate.set()
        assert (await running).status == 200
    assert (await client.get("/health")).status == 200
