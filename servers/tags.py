"""Find the beginnings of tags at the end of text that goes on."""


def partial_match(text: str, tag: str) -> int:
    """Return the length of the longest proper prefix of `tag` that ends `text`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
