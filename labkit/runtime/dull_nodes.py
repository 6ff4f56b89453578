"""`DullNodes`: the callback's answer for all nodes that nobody wants to stop at, without Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from labkit.runtime import ggml

_WORDS = ggml.MAX_NAME // 8


class DullNodes(dict[int, bool]):
    """Address -> False for nodes that never stop a graph; `on_node` is asked about all others.

    `on_first` is called before a graph's first node.

    Most nodes are dull by one word of their name (bytes 8 to 12), some by the whole of it.
    llama.cpp builds a graph anew when shapes change, in the same memory, and a name is final before
    the first question. So at each graph's first question the names at the addresses that were
    answered before are compared with what they were, all at once; what is as it was is dull in
    this graph too. That memory belongs to the context as long as it lives, so looking is safe.
    """

    _WORD = ggml.NAME_OFFSET + 8
    _MASK = (1 << 40) - 1

    def __init__(
        self, on_node: Callable[[int], bool], on_first: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._on_node = on_node
        self._on_first = on_first
        self._kinds: frozenset[int] | None = None
        self._names: frozenset[bytes] = frozenset()
        self._prefixes: tuple[bytes, ...] = ()
        self._shape: object = None
        self._first = 0
        self._begun = False
        self._dull_word: dict[int, int] = {}
        self._dull_name: dict[int, bytes] = {}
        self._learned = True
        self._memory = ggml.all_memory("Q")
        # numpy takes the address 0 for none, so its view begins a word later.
        self._gather = np.frombuffer(self._memory[1:], np.uint64)
        self._arrange()

    def watch(self, names: list[bytes], prefixes: tuple[bytes, ...]) -> None:
        """From now on all nodes are dull but those of these `names` and `prefixes`."""
        self._names, self._prefixes = frozenset(names), prefixes
        words = (int.from_bytes(name[8:13], "little") for name in (*names, *prefixes))
        self._kinds = frozenset(words)

    def begin(self, shape: object) -> None:
        """A new graph: nothing is known of it before its first question.

        Graphs of one shape begin at the same node, which then alone must not be answered for.
        """
        if self._begun and shape == self._shape and shape is not None:
            self.pop(self._first, None)
        else:
            self.clear()
        self._shape, self._begun = shape, False

    def __missing__(self, address: int) -> bool:
        kinds = self._kinds
        if kinds is None:
            return self._on_node(address)
        try:
            if not self._begun:
                self._begin_at(address)
            word = self._memory[(address + self._WORD) >> 3] & self._MASK
            if word not in kinds:
                self._dull_word[address] = word
                self._learned = self[address] = False
                return False
        except BaseException:
            # As a signal handler may raise here: the slow answer is right as well.
            return self._on_node(address)
        return self._on_node(address)

    def look_alike(self, address: int, name: bytes) -> None:
        """`on_node` found that this node only looks like one to stop at."""
        if name not in self._names and not name.startswith(self._prefixes):
            whole = ctypes.string_at(address + ggml.NAME_OFFSET, ggml.MAX_NAME)
            self._dull_name[address] = whole
            self._learned = self[address] = False

    def _begin_at(self, first: int) -> None:
        self._on_first()
        if not self._learned:
            self._arrange()
        mask = np.uint64(self._MASK)
        by_word = self._gather[self._word_places] & mask == self._word_values
        by_name = (self._gather[self._name_places] == self._name_values).all(axis=1)
        if not (by_word.all() and by_name.all()):
            self.clear()
            self._forget(self._dull_word, by_word)
            self._forget(self._dull_name, by_name)
            self._arrange()
        if len(self) < len(self._dull_word) + len(self._dull_name) - 1:
            self.update(dict.fromkeys(self._dull_word, False))
            self.update(dict.fromkeys(self._dull_name, False))
            self.pop(first, None)
        self._first, self._begun = first, True

    @staticmethod
    def _forget(known: dict, same: np.ndarray) -> None:
        for address, is_same in zip(list(known), same.tolist(), strict=True):
            if not is_same:
                del known[address]

    def _arrange(self) -> None:
        """Put what is known in arrays: where to look, and what should be there."""
        words, names = self._dull_word, self._dull_name
        self._word_places = ((np.fromiter(words, np.int64) + self._WORD) >> 3) - 1
        self._word_values = np.fromiter(words.values(), np.uint64)
        starts = ((np.fromiter(names, np.int64) + ggml.NAME_OFFSET) >> 3) - 1
        self._name_places = starts[:, None] + np.arange(_WORDS)
        whole = b"".join(names.values())
        self._name_values = np.frombuffer(whole, np.uint64).reshape(-1, _WORDS)
        self._learned = True
