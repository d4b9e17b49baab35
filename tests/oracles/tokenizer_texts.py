"""Texts to tokenize: many scripts, code, numbers, spaces in every place, and the licence in pieces.

Shared by the oracle script (another interpreter) and the tests: needs the standard library and Python 3.11 only.
"""

import pydoc_data.topics
from pathlib import Path

LICENSE = Path(__file__).parents[2] / "LICENSE"

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world! It's 12345 o'clock, isn't it? They'll say they've seen what we'd done; I'M SURE THEY'RE RIGHT.",
    "Äpfel, Öl und Übermut: die süße Größe misst 3½ Meter und kostet 1.234,56 €.",
    "Où est passé l'été de l'an 2003 ? Ça coûte déjà 12 000 francs à Besançon.",
    "¿Cuántos años tiene? ¡El niño cumplió 7 en enero!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю в 18:45.",
    "Η γρήγορη αλεπού πηδά πάνω από 2 τεμπέλικα σκυλιά.",
    "敏捷的棕色狐狸跳过了3只懒狗。今天是2024年5月17日，天气很好。",
    "いろはにほへと ちりぬるを。東京タワーの高さは333メートルです。",
    "다람쥐 헌 쳇바퀴에 타고파. 서울의 인구는 약 940만 명이다.",
    "نص حكيم له سر قاطع وذو شأن عظيم، في عام ٢٠٢٤.",
    "דג סקרן שט בים מאוכזב ולפתע מצא 5 חברים.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश, १२३४ में।",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดา 100 ฝูงสัตว์เดรัจฉาน",
    "Zażółć gęślą jaźń, 15 dkg żółtego sera. Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Pijamalı hasta yağız şoföre çabucak güvendi. İIıi.",
    "😀 😃👍🏽 👨‍👩‍👧‍👦 🇩🇪🇯🇵 ❤️ 1️⃣2️⃣ ✓ → ∞ ≠ ∑∫√ ℝ ½ ² ³ ⅷ Ⅳ ① 〇",
    "cafe\u0301 and caf\u00e9, A\u030a and \u00c5, \ufb01 and fi, \u1e9b\u0323, \ud55c and \u1112\u1161\u11ab",
    "zero\u200bwidth, no\u00a0break, thin\u2009space, ideographic\u3000space, line\u2028separator, soft\u00adhyphen",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\nprint(fib(10))  # 55\n",
    'for (int i = 0; i < 100; ++i) {\n\tsum += a[i] * 0x1F;\n\tif (!(i % 10)) printf("%d\\n", sum);\n}\n',
    '{"name": "value", "list": [1, 2.5, -3e10, null, true], "nested": {"a": "\\u00e9\\n"}}',
    "SELECT id, COUNT(*) FROM users WHERE age >= 18 AND name LIKE '%son' GROUP BY id HAVING COUNT(*) > 3;",
    '<div class="a b"><p>Text &amp; more</p><!-- comment 42 --></div>',
    "https://example.org/path/to/page?query=1&other=%20x#fragment-7 and mail@example.org",
    '$ git log --oneline | head -5\n1a2b3c4 Fix the thing\n$ echo "exit: $?"\nexit: 0\n',
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n# Heading\n\n1. one\n2. two\n   - nested\n\n> quote\n",
    "E = mc^2, a_{ij} = \\sum_k b_{ik} c_{kj}, \\frac{1}{2}, 3 \\times 10^{8}",
    "+49 (0)30 1234567-89, 12:34:56, 2024-05-17T08:09:10Z, 192.168.0.1, v1.2.3-rc4, 50%, #7, 1,000,000.00",
    "ALLCAPS CamelCase snake_case kebab-case iPhone15 H2O x86_64 utf8 3D 2nd 1990s '90s",
    "wow!!! ... --- *** ??? ((())) [[]] {{}} <<>> ~~~ ``` \"quoted\" 'single' “curly” «guillemets»",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bababababababababa 1111111111111111",
    "\u4f60\u597d\ufffd\U0001d54f\U00020000 \U0001f9d1\U0001f3ff\u200d\U0001f680",
]
SPACES = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\t \t",
    " leading",
    "  two leading",
    "trailing ",
    "trailing three   ",
    "a  b   c    d     e      f",
    "line\nline\r\nline\rline\n\nparagraph\n \n  indented\n\n\nend\n",
    "1",
    " 1",
    "a 1 b 22 c 333",
    "x=1, y=-2.5",
    "tab\t1\tx\n7\n",
    "Steps:\n\n1. first\n\n2. second",  # from here digits follow more than one space
    "a  1   2    3",
    "    42 is indented\n        7",
    "total:\t\t99\n\n\n100%",
]
CHAT = [
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are 1 bot.<|im_end|>\n  <|im_end|>12<|endoftext|> 3",
    "almost <|im_start and <|im_end |> and < |endoftext|>",
    "<repo_name>a/b<file_sep>c.py\nprint(1)<jupyter_code>2",
]


def texts() -> list[str]:
    """Return every text of this file, and the licence in pieces of 400 characters."""
    licence = LICENSE.read_text(encoding="utf-8")
    return SENTENCES + SPACES + CHAT + [licence[i : i + 400] for i in range(0, len(licence), 400)]


def python_documentation(count: int) -> list[str]:
    """Return `count` pieces of 450 characters of the manual that comes with this Python."""
    manual = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    pieces = [manual[i : i + 450] for i in range(0, len(manual), 450)]
    return pieces[:count]
