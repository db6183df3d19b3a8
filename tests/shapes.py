"""What checks shapes in tests: beartype, on the annotations that name one; the others are mypy's."""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The type checker for jaxtyping's import hook, which hands it a function of its own with the signature of ours."""
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if names_a_shape(hint)}
    return beartype(function)


def names_a_shape(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(names_a_shape(part) for part in get_args(hint))
