"""Feature switches; what real kernels answer: tests/integration/ebpf/test_features.py."""

from __future__ import annotations

from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features


def test_a_switch_answers_without_a_trial() -> None:
    features = Features(overrides=dict.fromkeys(Feature, False) | {Feature.UPROBE_MULTI: True})
    assert [feature for feature in Feature if feature in features] == [Feature.UPROBE_MULTI]
    assert str(features.error(Feature.RING_BUFFER)) == "[Errno 95] switched off"
    assert features.error(Feature.UPROBE_MULTI) is None
