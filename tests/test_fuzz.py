"""A fixed 1,475 bad inputs of fuzz.py: none may end in a traceback, a hang, or accepted though wrong."""

import fuzz


def test_bad_input_is_rejected_or_proved_right():
    found, failures = fuzz.campaign({kind: range(n // 20) for kind, n in fuzz.INPUTS.items()})
    assert not failures, failures[:5]
    assert sum(counts.total() for counts in found.values()) == 1475
    assert all(counts["rejected"] for counts in found.values()), found
    assert all(counts["accepted"] for counts in found.values()), found  # else the oracles prove nothing
