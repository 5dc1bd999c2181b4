"""The command line as it was typed, and as it would have to be typed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["CommandLine", "remember", "typed"]

_TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())


@dataclass(frozen=True)
class CommandLine:
    """The words after the program's name; as text they can be pasted into a shell."""

    words: tuple[str, ...]

    def minus(self, option: str) -> CommandLine:
        """Without an option that takes a value, in either spelling (`--a b`, `--a=b`)."""
        kept: list[str] = []
        words = iter(self.words)
        for word in words:
            if word == option:
                next(words, None)
            elif not word.startswith(f"{option}="):
                kept.append(word)
        return CommandLine(tuple(kept))

    def plus(self, option: str, *value: str) -> CommandLine:
        """With an option more, before a `--` that ends the options."""
        words = self.words
        end = words.index("--") if "--" in words else len(words)
        return CommandLine((*words[:end], option, *value, *words[end:]))

    def __str__(self) -> str:
        """The whole command."""
        return shlex.join(("graphsurgery", *self.words))


def remember(argv: Sequence[str]) -> None:
    """Keep the command line of this run."""
    _TYPED.set(tuple(argv))


def typed() -> CommandLine:
    """The command line of this run."""
    return CommandLine(_TYPED.get())
