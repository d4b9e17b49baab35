"""Templates from requests: rendered as the model's own would be, and stopped when they run or grow too long."""

import os
import subprocess
import sys

import pytest

from pagedjax.errors import InvalidRequestError
from pagedjax.text.template_worker import TemplateWorker
from tests.fakes import byte_tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def worker():
    worker = TemplateWorker(byte_tokenizer().hf, max_chars=1000, render_seconds=60.0)
    yield worker
    worker.close()


def test_it_renders_what_the_tokenizer_would(worker):
    template = "{{ eos_token }}{% for m in messages %}{{ m.role }}={{ m.content }}{{ extra }}{% endfor %}"
    expected = byte_tokenizer().render_chat(HI, chat_template=template, extra="!")
    assert worker.render(HI, chat_template=template, extra="!") == expected == "<eos>user=hi!"


def test_a_template_without_end_is_stopped_and_costs_nobody_else(worker, monkeypatch):
    template = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_render_seconds", 0.1)
        with pytest.raises(InvalidRequestError, match=r"running after 0\.1 seconds"):
            worker.render(HI, chat_template=template)
    assert worker.render(HI, chat_template="fine") == "fine"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 1001 }}", "made 1001 characters, more than 1000"),
        ("{{ 'x' * 10**11 }}", "refuses the messages|more memory"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages.*unsafe"),
        ("{% for %}", "refuses the messages"),
        ("{{ raise_exception('y' * 10**6) }}", "refuses the messages: yyy"),
    ],
)
def test_a_hostile_template_is_the_requests_own_fault_and_costs_nobody_else(worker, template, message):
    with pytest.raises(InvalidRequestError, match=f"(?s){message}") as raised:
        worker.render(HI, chat_template=template)
    assert len(str(raised.value)) <= 1000
    assert worker.render(HI, chat_template="fine") == "fine"


def test_what_is_wrong_with_the_messages_keeps_its_name(worker):
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].role") as raised:
        worker.render([{"role": "wizard", "content": "hi"}], chat_template="fine")
    assert raised.value.param == "messages"


UNGUARDED = """
from pagedjax.text.template_worker import TemplateWorker
from tests.fakes import byte_tokenizer

print("began")
worker = TemplateWorker(byte_tokenizer().hf, max_chars=1000)
print(worker.render([{"role": "user", "content": "hi"}], chat_template="fine"))
worker.close()
"""


def test_a_script_that_is_not_guarded_runs_once(tmp_path):
    """Its process imported the script that had started it, which began anew, up to the engine."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environ)
    assert ran.stdout == "began\nfine\n", ran.stderr
