"""What machines ask about the server."""

import pagedjax


async def test_health_is_200_without_a_body(http):
    for answer in (await http.get("/health"), await http.get("/ping"), await http.post("/ping")):
        assert (answer.status, await answer.read()) == (200, b"")


async def test_version_is_the_packages(http):
    assert await (await http.get("/version")).json() == {"version": pagedjax.__version__}
