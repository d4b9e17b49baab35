"""Twelve classes of hostile or broken HTTP requests, drawn at random, as the bytes that go over the wire.

None of them is a request that a server should carry out: each must be answered with 4xx, or the connection closed.
"""

import json

POSTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/abort": {"request_id": "x"},
}
GETS = ("/", "/board/state", "/board/board.js", "/v1/models", "/health", "/ping", "/version", "/load", "/metrics")
JUNK = (
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "x",
    [],
    {},
    [[]],
    {"a": {}},
    ["x", 1],
    [None],
    "\u0000",
    "💥" * 50,
    -0.0,
    1e308,
)
# What is refused without a grammar library; `test_hostile_grammars` attacks that one, over a real engine.
GRAMMARS = (
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": ["(a{1,9999}){1,9999}["]}},
    {"structured_outputs": {"grammar": None}},
    {"structured_outputs": {"json": {"allOf": [{"$ref": "https://evil.example/x"}]}, "regex": "a"}},
    {"structured_outputs": {"json_object": True, "eval": "1"}},
    {"structured_outputs": [{"regex": "a"}] * 1000},
    {"guided_json": {"type": "object"}},
    {"structured_outputs": {"choice": []}},
)
TEMPLATES = (
    "{% for i in range(999999999) %}x{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ 'x' * 10**10 }}",
    "{% include '/etc/passwd' %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
)
PATHS = (
    "/../../etc/passwd", "/board/../../../etc/passwd", "/board/..%2f..%2fetc%2fpasswd", "/board/board.js%00.html",
    "/v1//completions", "//v1/completions", "/v1/completions/", "/V1/completions", "/%2e%2e/%2e%2e/",
    "/v1/./completions/..",    "/v1/models/..%2f..%2f", "/v1/models/%ff%fe", "/v1/models/" + "a" * 4000,
    "/" + "a/" * 2000, "/v1/completions;x=1",
    "/.git/config", "/board/__init__.py", "/board/state/", "*", "/\u00e9", "/v1/completions%20", "/%", "/%zz",
)  # fmt: skip


def http(method, path, body=b"", *, headers=()):
    """One request that asks for the connection to be closed after its answer."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def post(draw, mutate):
    path = draw.choice(list(POSTS))
    return http("POST", path, mutate(dict(POSTS[path])))


def truncated_json(draw):
    return post(draw, lambda body: json.dumps(body).encode()[: draw.randrange(1, 10)])


def wrong_types(draw):
    def mutate(body):
        key = draw.choice(list(body))
        wrong = [junk for junk in JUNK if not is_fine(key, junk)]
        return json.dumps(body | {key: draw.choice(wrong)}).encode()

    return post(draw, mutate)


def is_fine(key, value):
    """Whether junk happens to be a value that the field takes; null is an absent field."""
    if key in ("prompt", "input", "request_id") and isinstance(value, str):
        return True
    if key in ("tokens", "request_id") and value == []:
        return True
    return value is None and key not in ("messages", "prompt", "input", "tokens", "request_id")


def huge_numbers(draw):
    number = draw.choice(
        ["9" * draw.randrange(30, 8000), "-" + "9" * 400, "1e999", "-1e999", "NaN", "Infinity", "1" * 300 + ".5"]
    )
    field = draw.choice(["temperature", "seed", "top_p", "n", "max_tokens", "tokens", "logit_bias", "priority"])
    return post(draw, lambda body: (json.dumps(body)[:-1] + f', "{field}": {number}}}').encode())


def deep_nesting(draw):
    depth = draw.choice([65, 100, 1000, 20000])
    opening, closing = draw.choice([("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")])
    text = opening * depth + ("1" if opening != "[" else "") + closing * draw.choice([depth, depth - 1])
    return post(draw, lambda body: (json.dumps(body)[:-1] + f', "messages": {text}}}').encode())


def invalid_utf8(draw):
    bad = draw.choice([b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\\ud800"])
    return post(
        draw, lambda body: json.dumps(body | {"user": "@@"}).encode().replace(b"@@", bad * draw.randrange(1, 20))
    )


def giant_headers(draw):
    headers = draw.choice(
        [
            [f"X-Big: {'a' * draw.randrange(9000, 200_000)}"],
            [f"X-{i}: a" for i in range(draw.randrange(130, 2000))],
            ["X" * draw.randrange(9000, 50_000) + ": a"],
            ["Cookie: " + "a=b; " * draw.randrange(2000, 10_000)],
        ]
    )
    return http("GET", draw.choice(GETS), headers=headers)


def slow_loris(draw):
    """What a client sends that never finishes; whoever sends it leaves after a moment."""
    whole = post(draw, lambda body: json.dumps(body).encode())
    return whole[: draw.randrange(1, len(whole) - 1)]


def pipelining(draw):
    kinds = [wrong_types, truncated_json, invalid_utf8, wrong_methods]
    parts = [draw.choice(kinds)(draw).replace(b"Connection: close\r\n", b"") for _ in range(draw.randrange(2, 30))]
    return b"".join(parts) + wrong_types(draw)


def wrong_methods(draw):
    if draw.random() < 0.5:
        return http(
            draw.choice(["GET", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND", "OPTIONS"]), draw.choice(list(POSTS))
        )
    return http(draw.choice(["PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"]), draw.choice(GETS))


def path_tricks(draw):
    return http(draw.choice(["GET", "POST"]), draw.choice(PATHS))


def hostile_templates(draw):
    field = draw.choice([{"chat_template": draw.choice(TEMPLATES)}, {"chat_template_kwargs": {"chat_template": "x"}}])
    messages = POSTS["/v1/chat/completions"]["messages"]
    path = draw.choice(["/v1/chat/completions", "/tokenize"])
    return http("POST", path, json.dumps({"messages": messages} | field).encode())


def hostile_grammars(draw):
    path = draw.choice(["/v1/chat/completions", "/v1/completions"])
    return http("POST", path, json.dumps(POSTS[path] | draw.choice(GRAMMARS)).encode())


CLASSES = (
    truncated_json, wrong_types, huge_numbers, deep_nesting, invalid_utf8, giant_headers, slow_loris, pipelining,
    wrong_methods, path_tricks, hostile_templates, hostile_grammars,
)  # fmt: skip
