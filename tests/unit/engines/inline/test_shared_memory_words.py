"""Memory as words and bytes."""

from __future__ import annotations

from dprobes.engines.inline.shared_memory import Words


def test_words_are_zeros_at_first() -> None:
    words = Words(12)
    assert (len(words.words) * 8) % 4096 == 0
    assert not any(words.words)
    words.memory[8:16] = (77).to_bytes(8, "little")
    assert words.words[1] == 77
    words.close()
