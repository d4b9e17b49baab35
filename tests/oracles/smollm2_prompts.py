"""The prompts on which the embedded SmolLM2-135M-Instruct is compared with transformers.

Data only, for any Python from 3.11: plain texts, conversations (rendered with the model's own chat template) and
token ids, and the paragraph whose perplexity is compared.
"""

PERPLEXITY_TEXT = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
    "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
)

DIARY = " ".join(
    f"On day {day} the ship sailed {17 * day % 40 + 3} miles, the wind came from the {wind}, and the cook made {dish}."
    for day, wind, dish in zip(
        range(1, 31),
        ["north", "south", "west", "east", "north-west", "south-east"] * 5,
        ["soup", "bread", "fish", "rice", "beans"] * 6,
        strict=True,
    )
)

CODE = "\n\n".join(
    f"def area_of_{name}({arguments}):\n    '''Return the area of a {name}.'''\n    return {formula}"
    for name, arguments, formula in [
        ("square", "side", "side * side"),
        ("rectangle", "width, height", "width * height"),
        ("triangle", "base, height", "base * height / 2"),
        ("circle", "radius", "3.14159265 * radius * radius"),
        ("ellipse", "a, b", "3.14159265 * a * b"),
        ("trapezoid", "a, b, height", "(a + b) * height / 2"),
        ("ring", "outer, inner", "area_of_circle(outer) - area_of_circle(inner)"),
        ("cube", "side", "6 * area_of_square(side)"),
        ("box", "width, height, depth", "2 * (width * height + width * depth + height * depth)"),
        ("sphere", "radius", "4 * area_of_circle(radius)"),
        ("cylinder", "radius, height", "2 * area_of_circle(radius) + 2 * 3.14159265 * radius * height"),
        ("cone", "radius, slant", "area_of_circle(radius) + 3.14159265 * radius * slant"),
        ("rhombus", "p, q", "p * q / 2"),
        ("kite", "p, q", "p * q / 2"),
    ]
)

PROMPTS: dict[str, str | list[dict[str, str]] | list[int]] = {
    "plain": "The capital of France is",
    "story": "Once upon a time, in a village by the sea, there lived a",
    "list": "Ingredients for pancakes:\n1.",
    "arithmetic": "12 + 30 = 42\n17 + 5 = 22\n41 + 8 =",
    "one_word": "Hello",
    "one_token": [504],
    "one_special_token": [1],
    "code_python": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "code_sql": "SELECT name, COUNT(*) FROM customers WHERE country = 'Norway' GROUP BY",
    "json": '{"name": "Ada Lovelace", "born": 1815, "field":',
    "chinese": "中国的首都是北京,法国的首都是",
    "russian": "Жили-были старик со старухой у самого синего моря.",
    "emoji": "I love pizza 🍕 and ice cream 🍦! My favourite animals are 🐶, 🐱 and",
    "whitespace": "\n\n   \tname\t\tage\n",
    "repetition": "a b c a b c a b c a b",
    "quote": "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "chat_sky": [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    "chat_haiku": [{"role": "user", "content": "Write a haiku about the autumn moon."}],
    "chat_system": [
        {"role": "system", "content": "You are a pirate. Answer in one sentence."},
        {"role": "user", "content": "Where is the treasure? 🏴‍☠️"},
    ],
    "chat_turns": [
        {"role": "user", "content": "My name is Ingrid and I live in Bergen."},
        {"role": "assistant", "content": "Nice to meet you, Ingrid!"},
        {"role": "user", "content": "What is my name, and where do I live?"},
    ],
    "chat_code": [{"role": "user", "content": "Write a Python function that reverses a string."}],
    "long_diary": DIARY + " On day 31",
    "long_code": CODE + "\n\ndef area_of_",
    "long_chat": [{"role": "user", "content": "Summarise this diary in one sentence: " + DIARY}],
}
