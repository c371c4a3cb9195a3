"""The lease of the gateway that leads a rollout: its length, and the times that depend on it."""

from __future__ import annotations

LEASE_SECONDS = 10.0
#: Parts of the lease: the time between two heartbeats of a leader, and between two looks at the
#: store while nothing runs.
HEARTBEAT, IDLE = 0.2, 0.4
#: A state that no look has confirmed for this part of the lease is doubtful. The rest of the lease
#: is for stopping the processes.
DOUBT = 0.7
#: The longest wait for an outcome, in leases: another gateway may have to take over first.
SETTLED_LEASES = 2
#: The longest wait for an operation of the repository.
STORE_SECONDS = LEASE_SECONDS / 2
