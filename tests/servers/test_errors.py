"""The error middleware on its own."""

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from servers.errors import errors_as_json


def raising(error):
    async def handler(request):
        raise error

    return handler


async def test_a_client_that_has_left_is_no_failure_of_ours(caplog):
    with pytest.raises(ConnectionResetError):
        await errors_as_json(make_mocked_request("GET", "/"), raising(ConnectionResetError()))
    assert caplog.records == []


async def test_the_unexpected_is_logged_with_its_trace(caplog):
    response = await errors_as_json(make_mocked_request("GET", "/"), raising(KeyError("x")))
    assert response.status == 500
    assert caplog.records[0].exc_info[0] is KeyError


async def test_other_http_errors_keep_their_status():
    response = await errors_as_json(make_mocked_request("GET", "/"), raising(web.HTTPGone()))
    assert response.status == 410
