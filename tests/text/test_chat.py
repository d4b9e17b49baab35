"""Messages are checked before the template sees them, and whatever the template says reaches the caller."""

import pytest

from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.text.chat import RESERVED_ARGUMENTS, load_chat_template, validate_messages
from pagedjax.text.tokenizer import Tokenizer
from tests.text.tokenizers import byte_level, tokenizer_of

ALTERNATING = (  # as Llama 2's and Mistral's
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{% endfor %}"
)
SHOWS_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def with_template(template):
    return Tokenizer(byte_level().hf, chat_template=template)


def refused(tokenizer, messages, **options):
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(messages, **options)
    return caught.value


def test_the_embedded_models_template_writes_chatml_with_its_system_prompt():
    assert tokenizer_of("demo").render_chat(HELLO) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_the_last_message_ends_the_text():
    assert tokenizer_of("demo").render_chat(HELLO, add_generation_prompt=False).endswith("user\nHello<|im_end|>\n")


def test_continuing_the_final_message_leaves_it_open():
    messages = [*HELLO, {"role": "assistant", "content": "Good day, "}]
    text = tokenizer_of("demo").render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nGood day, ")


def test_continuing_and_starting_a_message_at_once_is_refused():
    error = refused(tokenizer_of("demo"), HELLO, continue_final_message=True)
    assert error.param == "continue_final_message"
    assert "set add_generation_prompt to false" in str(error)


def test_the_template_writes_the_beginning_of_sequence_and_encoding_adds_no_second_one():
    tokenizer = with_template(ALTERNATING)
    tokenizer.hf.add_bos_token = True
    bos = tokenizer.hf.bos_token_id
    assert tokenizer.encode("hello")[0] == bos
    ids = tokenizer.encode_chat(HELLO)
    assert ids[0] == bos
    assert ids.count(bos) == 1


def test_text_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert validate_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_keys_that_templates_may_know_pass_through_and_the_callers_objects_stay_as_they_are():
    message = {"role": "assistant", "content": "hi", "reasoning_content": "hmm", "name": "x"}
    (checked,) = validate_messages([message])
    assert checked == message
    assert checked is not message


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "messages is []; it must be a list of at least one message"),
        ("hello", "messages is 'hello'; it must be a list"),
        ({"role": "user", "content": "x"}, "it must be a list"),
        (["hello"], "messages[0] is 'hello'; it must be an object with role and content"),
        (
            [*HELLO, {"role": "robot", "content": "x"}],
            "messages[1].role is 'robot'; it must be one of system, developer, user",
        ),
        ([{"content": "x"}], "messages[0].role is None"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role is ['user']"),
        ([{"role": "user"}], "messages[0] has no content; give a string or a list of text parts"),
        ([{"role": "assistant", "content": None}], "messages[0] has no content"),
        ([{"role": "user", "content": 5}], "messages[0].content is 5; it must be a string or a list of text parts"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0] is 'image_url'; only parts like",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] is 'text'"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] is 'x'"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0] has no content"),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], "messages[0].tool_calls is 5; it must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls holds {}"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls holds arguments that are not JSON: '{'",
        ),
    ],
)
def test_a_malformed_message_is_refused_by_name(messages, part):
    error = refused(tokenizer_of("demo"), messages)
    assert part in str(error)
    assert error.param == "messages"


def test_the_templates_own_message_reaches_the_caller():
    error = refused(with_template(ALTERNATING), [*HELLO, *HELLO])
    assert str(error) == "the chat template refuses the messages: Roles must alternate!"
    assert error.param == "messages"


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{{ messages[7].role.x }}", "{% if %}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails_is_the_requests_error(template):
    assert "the chat template refuses the messages: " in str(refused(with_template(template), HELLO))


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os }}"]
)
def test_a_template_cannot_leave_the_sandbox(template):
    assert "unsafe" in str(refused(with_template(template), HELLO))


def test_without_a_template_the_message_says_how_to_give_one():
    error = refused(byte_level(), HELLO)
    assert str(error) == "the model has no chat template; give one with --chat-template, or send a plain prompt"


def test_a_template_given_with_the_request_comes_before_the_models():
    assert tokenizer_of("demo").render_chat(HELLO, chat_template="{{ messages[0].content }}!") == "Hello!"


def test_a_template_without_the_developer_role_gets_its_messages_as_the_systems():
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in tokenizer_of("demo").render_chat(messages)
    knows_it = "{% for m in messages %}{{ 'D' if m.role == 'developer' else 'x' }}{% endfor %}"
    assert with_template(knows_it).render_chat(messages) == "Dx"


def test_tools_and_template_variables_reach_the_template():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = with_template(SHOWS_TOOLS).render_chat(HELLO, tools=tools, enable_thinking=True)
    assert text == "add;user:Hello;<think>"


@pytest.mark.parametrize("arguments", ["[" * 100_000, "9" * 5000], ids=["nested", "digits"])
def test_tool_arguments_beyond_what_python_parses_are_refused(arguments):
    """They were errors of other kinds, which a server answered with 500."""
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError, match="arguments that are not JSON"):
        validate_messages([{"role": "assistant", "tool_calls": [call]}])


def test_tool_arguments_sent_as_json_text_are_objects_to_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    assert with_template(SHOWS_TOOLS).render_chat(messages) == 'assistant:{"a": 1};tool:2;'


@pytest.mark.parametrize(
    "name",
    sorted(
        RESERVED_ARGUMENTS - {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    ),
)
def test_a_template_variable_cannot_change_how_the_prompt_is_made(name):
    error = refused(tokenizer_of("demo"), HELLO, **{name: True})
    assert f"chat_template_kwargs holds {name!r}" in str(error)
    assert error.param == "chat_template_kwargs"


def test_a_template_is_read_from_a_file_or_taken_as_text(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}é", encoding="utf-8")
    assert load_chat_template(str(file)) == "{{ messages }}é"
    assert load_chat_template("{{ x }}") == "{{ x }}"
    assert load_chat_template(None) is None


def test_an_unreadable_template_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no_such_file.jinja' cannot be read .*; give a Jinja file, or the template"):
        load_chat_template(str(tmp_path / "no_such_file.jinja"))
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="latin' cannot be read"):
        load_chat_template(str(tmp_path / "latin"))


def test_a_template_that_is_no_jinja_is_refused_before_any_request():
    with pytest.raises(ConfigError, match="in line 2: unexpected '}'; correct it"):
        load_chat_template("{% for m in messages %}\n{{ m }")
    marked = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    assert load_chat_template(marked) == marked
