"""A number as a person writes it: Python also reads digits of other scripts and 1_0, which are slips more likely than meant."""


def read_number(text: str) -> float:
    """ValueError unless `text` is a number in plain ASCII."""
    if not text.isascii() or "_" in text:
        raise ValueError(f"not a plain number: {text!r}")
    return float(text)
