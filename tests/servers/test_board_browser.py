"""The board in a real Chromium, driven over its debugging protocol: what people see and can do."""

import asyncio
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.browser


class Page:
    """One page of one browser."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors = []

    async def send(self, method, **params):
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(message["params"])
            if message.get("id") == number:
                return message["result"]

    async def value(self, expression):
        result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression):
        for _ in range(200):
            if await self.value(f"Boolean({expression})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    async def type(self, text, key=None):
        await self.send("Input.insertText", text=text)
        if key is not None:
            code = {"Enter": 13, "Tab": 9}[key]
            for kind in ("keyDown", "keyUp"):
                await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                                text="\r" if key == "Enter" else "")  # fmt: skip


@pytest.fixture
async def page(http):
    assert CHROMIUM, "install chromium to run the browser tests"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=390,800"]
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM, *options, f"--user-data-dir={profile}", str(http.make_url("/")),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(30):
                while not port_file.exists() or "\n" not in port_file.read_text():  # noqa: ASYNC110  a browser writes it
                    await asyncio.sleep(0.05)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                targets = await (await session.get(f"http://127.0.0.1:{port}/json")).json(content_type=None)
                address = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.send("Runtime.enable")
                    await page.send("Log.enable")
                    await page.until("document.getElementById('connection')?.textContent === 'live'")
                    yield page
        finally:
            browser.kill()
            await browser.wait()


async def test_the_board_is_live_fits_a_phone_and_breaks_no_rule(page):
    assert await page.value("document.getElementById('model').textContent") == "fake"
    assert await page.value("document.documentElement.scrollWidth <= window.innerWidth")
    assert await page.value("document.getElementById('blocks').width > 0")
    assert page.errors == []


async def test_a_request_can_be_cancelled_from_the_table(page, http, fake):
    fake.gate.clear()
    running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "ab", "request_id": "one"}))
    await page.until("document.querySelector('[data-request=\"cmpl-one\"]')")
    await page.value("document.querySelector('[data-request=\"cmpl-one\"]').click()")
    answer = await (await running).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    await page.until("document.getElementById('no-requests').textContent.startsWith('No request')")
    assert page.errors == []


async def test_the_playground_talks_to_the_model_by_keyboard(page):
    await page.value("document.getElementById('max-tokens').value = 7")
    await page.value("document.getElementById('message').focus()")
    await page.type("hi", "Enter")
    await page.until("document.querySelector('#chat .assistant')?.textContent === 'user:hi'")
    await page.until("document.getElementById('stop').disabled")
    assert json.loads(await page.value("JSON.stringify(conversation.map(m => m.role))")) == ["user", "assistant"]
    assert page.errors == []


async def test_a_server_that_stops_is_shown_as_lost(page, fake):
    fake.error = RuntimeError("device lost")
    await page.value("document.getElementById('message').focus()")
    await page.type("hi", "Enter")
    await page.until("document.querySelector('#chat .error')")
    await page.until("document.getElementById('connection').textContent.startsWith('not live')")
