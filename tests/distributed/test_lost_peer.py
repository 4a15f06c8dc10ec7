"""What gloo raises while a rank waits for another one, in the words of this package."""

from __future__ import annotations

from torchtitan_lite.distributed.lost_peer import as_peer_lost

_TIMED_OUT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation "
    "to complete"
)


def test_a_time_out_names_the_call_that_another_rank_does_not_make_as_a_cause() -> None:
    lost = as_peer_lost(RuntimeError(_TIMED_OUT))
    assert lost is not None
    assert "waited until the time-out" in str(lost)
    assert "or does not make the same call, as under `if rank == 0`" in str(lost)


def test_a_connection_that_was_given_up_after_a_time_out_is_a_lost_peer_too() -> None:
    lost = as_peer_lost(RuntimeError("Application timeout caused pair closure"))
    assert lost is not None
    assert "waited until the time-out" in str(lost)


def test_another_error_is_no_lost_peer() -> None:
    assert as_peer_lost(RuntimeError("Timed out waiting for a lock")) is None
