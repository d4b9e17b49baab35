"""The conversation in the terminal, with a model that answers from a list and a person whose lines are given."""

import io

import pytest

from pagedjax.errors import InvalidRequestError
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.sampling_params import SamplingParams
from pagedjax.terminal_chat import HELP, TerminalChat


class ModelThatSays:
    """Streams the given pieces, one list an answer; a piece that is an exception is raised. Keeps what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.num_closed = 0

    def stream(self, prompt, sampling_params):
        self.asked.append(prompt)
        try:
            for piece in self.answers.pop(0):
                if not isinstance(piece, str):
                    raise piece
                completion = CompletionOutput(index=0, text=piece, token_ids=[1])
                yield RequestOutput(
                    request_id="r", prompt=None, prompt_token_ids=[1], outputs=[completion], finished=False
                )
        finally:
            self.num_closed += 1


def talk(model, *lines, system=None):
    """Type `lines` and return what the terminal shows. A line that is an exception is raised at the prompt."""
    typed = iter([*lines, EOFError()])

    def read_line(prompt):
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    out = io.StringIO()
    TerminalChat(model, SamplingParams(), system=system, read_line=read_line, out=out).run()
    return out.getvalue()


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_an_answer_streams_and_both_sides_are_remembered():
    model = ModelThatSays(["Hel", "lo"], ["Fine"])
    shown = talk(model, "Hi", "How are you?")
    assert "Hello\n[2 tokens, " in shown
    assert "Fine\n[1 tokens, " in shown
    assert model.asked == [[user("Hi")], [user("Hi"), assistant("Hello"), user("How are you?")]]


def test_reset_forgets_all_but_the_system_message():
    model = ModelThatSays(["a"], ["b"])
    talk(model, "one", "/reset", "two", system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert model.asked == [[system, user("one")], [system, user("two")]]


def test_an_interrupt_ends_the_answer_and_keeps_what_was_said():
    model = ModelThatSays(["Once upon", KeyboardInterrupt()], ["Yes"])
    shown = talk(model, "A story", "Go on")
    assert "Once upon [interrupted]\n" in shown
    assert model.asked[1] == [user("A story"), assistant("Once upon"), user("Go on")]
    assert model.num_closed == 2


def test_an_interrupt_at_the_prompt_shows_the_help_and_goes_on():
    model = ModelThatSays(["a"])
    shown = talk(model, KeyboardInterrupt(), "one")
    assert shown.count(HELP) == 2
    assert model.asked == [[user("one")]]


def test_a_refused_question_is_not_remembered():
    model = ModelThatSays([InvalidRequestError("prompt has 9 tokens")], ["ok"])
    shown = talk(model, "too long", "short")
    assert "[prompt has 9 tokens; or begin anew with /reset]" in shown
    assert model.asked[1] == [user("short")]


@pytest.mark.parametrize("line", ["/exit", ""])
def test_leaving_and_empty_lines_ask_nothing(line):
    model = ModelThatSays()
    talk(model, line)
    assert model.asked == []
