"""Values of options that several commands parse."""

from longspan.errors import ConfigError


def parse_numbers(flag: str, text: str, *, positive: bool = False) -> tuple[int, ...]:
    """Integers between commas, each at least 0, or at least 1 if they must be positive."""
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (-1,)
    if any(number < 0 for number in numbers):
        raise ConfigError(f"{flag} {text} must be integers separated by commas, for example 512,2048")
    if positive and 0 in numbers:
        raise ConfigError(f"{flag} {text} contains 0; every length must be at least 1")
    return numbers
