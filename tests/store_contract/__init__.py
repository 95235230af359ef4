"""The store contract as tests: subclass `StoreContract`, override `make`, and pytest runs them all.

The chains in these tests are genuine, so a store that validates its input passes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from killick.clock import Clock, ManualClock
from killick.store.protocol import Store
from store_contract.appends import Appending
from store_contract.claims import Claiming
from store_contract.concurrency import Together
from store_contract.counts import Counting
from store_contract.creation import Births
from store_contract.fairness import Fairness
from store_contract.inbox import Inbox
from store_contract.leases import Rights
from store_contract.lifecycle import Opening
from store_contract.listing import Finding
from store_contract.maintenance import Keeping
from store_contract.notifications import Watching
from store_contract.outbox import Feeding
from store_contract.probes import Again
from store_contract.rate_limits import RateLimits
from store_contract.search_terms import SearchTerms
from store_contract.slots import Conditions, Renewals
from store_contract.transactions import Transacting
from store_contract.values import Values


class StoreContract(
    Births,
    Appending,
    Values,
    Rights,
    Inbox,
    Conditions,
    Renewals,
    Finding,
    Counting,
    Claiming,
    Fairness,
    Feeding,
    Watching,
    SearchTerms,
    RateLimits,
    Keeping,
    Opening,
    Together,
    Transacting,
):
    """The tests. A backend overrides `make`, and `reopen` if its data outlives the process; if applications can have
    tables in its database, also `connect` and perhaps `placeholder`.

    The store must use the given clock: these tests move it.
    """

    def make(self, tmp_path: Path, clock: Clock) -> Store:
        """Returns a new and empty store."""
        raise NotImplementedError

    def reopen(self, store: Store, clock: Clock) -> Store | None:
        """Opens the same location again, as another process would, whether `store` is closed or not."""
        return None

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def store(self, tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
        store = self.make(tmp_path, clock)
        yield store
        store.close()

    @pytest.fixture
    def again(self, store: Store, clock: ManualClock) -> Iterator[Again]:
        """Opens the store again; skips the test if that is impossible."""
        opened: list[Store] = []

        def again() -> Store:
            other = self.reopen(store, clock)
            if other is None:
                pytest.skip("this store does not outlive its process")
            opened.append(other)
            return other

        yield again
        for other in opened:
            other.close()
