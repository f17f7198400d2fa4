"""ContinuedTokens: a prompt that is left where it is, and the tokens that came after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class ContinuedTokens(Sequence[int]):
    """Reads like the list of both, and never copies the prompt, which may make its tokens as they are asked for."""

    __slots__ = ("_num_prompt_tokens", "_output", "_prompt")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._num_prompt_tokens = len(prompt)
        self._output: list[int] = []

    def append(self, token: int) -> None:
        self._output.append(token)

    def replace_last(self, token: int) -> None:
        """Another token in place of the last one that was appended."""
        self._output[-1] = token

    def __len__(self) -> int:
        return self._num_prompt_tokens + len(self._output)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        size = self._num_prompt_tokens
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            if stop <= size:
                return self._prompt[start:stop]
            output = self._output[max(0, start - size) : stop - size]
            return [*self._prompt[start:], *output] if start < size else output
        if index < 0:
            index += len(self)
        if index < 0:
            raise IndexError("no such token")
        return self._prompt[index] if index < size else self._output[index - size]
