"""Whatever happens to peers, every chunk is in exactly one place, and no peer serves that must
not.
"""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_core.p2p import Peer
from lmcache_core.security import Principal, TicketVerifier
from lmcache_servicekit.errors import ConflictError

from tests.fixtures.broker import (
    ACME,
    KEYS,
    OPERATOR,
    RIVAL,
    FakeClock,
    at_once,
    transfer_scheduler,
)
from tests.fixtures.broker import wanted as wanted_from

IDS = ["a", "b", "c", "d"]
MAX_PULLS = 3
TICKET_S = 5.0
LEASE_S = 8.0

ids = st.sampled_from(IDS)
principals = st.sampled_from([ACME, RIVAL, OPERATOR])
chunk_ids = st.integers(0, 20).map(lambda i: f"{i:032x}")
holder_lists = st.lists(st.sampled_from([*IDS, "zz"]), max_size=5)
places = st.sampled_from(["", "x", "y"])


class Model:
    """What one peer should be, in the plainest terms."""

    def __init__(self, incarnation: int, ends_s: float, draining: bool) -> None:
        self.incarnation = incarnation
        self.ends_s = ends_s
        self.draining = draining
        self.pulls: list[float] = []


class BrokerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.directory = PeerDirectory(PeerLimits(1000, 1000, 3_600_000), self.clock)
        self.scheduler = transfer_scheduler(
            self.directory, self.clock, max_pulls=MAX_PULLS, ticket_ttl_ms=int(TICKET_S * 1000)
        )
        self.models: dict[tuple[str, str], Model] = {}

    def live(self, principal: Principal, peer_id: str) -> Model | None:
        for owner in (principal.tenant, "*"):
            model = self.models.get((owner, peer_id))
            if model is not None and self.clock.now_s < model.ends_s:
                return model
        return None

    @rule(
        who=principals,
        peer_id=ids,
        incarnation=st.integers(1, 3),
        zone=places,
        node=places,
        load=st.floats(0, 1),
        leaving=st.booleans(),
    )
    def announce(
        self,
        who: Principal,
        peer_id: str,
        incarnation: int,
        zone: str,
        node: str,
        load: float,
        leaving: bool,
    ) -> None:
        owner = "*" if who.role == "admin" else who.tenant
        peer = Peer(peer_id, incarnation, f"lm://{peer_id}.example:1", "sidecar", zone, node)
        known = self.models.get((owner, peer_id))
        if known is not None and self.clock.now_s >= known.ends_s:
            known = None
        try:
            lease = self.directory.announce(
                who, peer, load=load, ttl_ms=int(LEASE_S * 1000), draining=leaving
            )
        except ConflictError:
            assert known is not None
            assert incarnation < known.incarnation
            return
        if known is None or incarnation > known.incarnation:
            known = self.models[(owner, peer_id)] = Model(incarnation, 0.0, leaving)
        known.ends_s = self.clock.now_s + LEASE_S
        known.draining = known.draining or leaving
        assert lease.draining == known.draining

    @rule(who=principals, peer_id=ids)
    def remove(self, who: Principal, peer_id: str) -> None:
        self.directory.remove(who, peer_id)
        self.models.pop(("*" if who.role == "admin" else who.tenant, peer_id), None)

    @rule(peer_id=ids)
    def drain(self, peer_id: str) -> None:
        model = self.live(OPERATOR, peer_id)
        if model is not None:
            self.directory.drain(OPERATOR, peer_id)
            model.draining = True

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(
        who=principals,
        requester=ids,
        wanted=st.dictionaries(chunk_ids, holder_lists, max_size=8),
    )
    def transfer(self, who: Principal, requester: str, wanted: dict[str, list[str]]) -> None:
        plan = at_once(self.scheduler.ask(who, requester, wanted_from(wanted), 0))
        served = [chunk for pull in plan.assignments for chunk in pull.chunk_ids]
        assert sorted([*served, *plan.unassigned]) == sorted(wanted)
        assert len({pull.instance for pull in plan.assignments}) == len(plan.assignments)
        able = {
            peer_id
            for peer_id in IDS
            if peer_id != requester and self.is_able(self.live(who, peer_id))
        }
        for pull in plan.assignments:
            assert pull.instance in able
            assert all(pull.instance in wanted[chunk] for chunk in pull.chunk_ids)
            assert (
                TicketVerifier(KEYS, pull.instance, self.clock.unix_ms).verify(pull.ticket).tenant
                == who.tenant
            )
        assert not any(able & set(wanted[chunk]) for chunk in plan.unassigned)
        self.count(who, [pull.instance for pull in plan.assignments])

    def is_able(self, model: Model | None) -> bool:
        return model is not None and not model.draining and self.num_pulls(model) < MAX_PULLS

    def num_pulls(self, model: Model) -> int:
        return sum(ends_s > self.clock.now_s for ends_s in model.pulls)

    def count(self, who: Principal, peer_ids: Iterable[str]) -> None:
        for peer_id in peer_ids:
            model = self.live(who, peer_id)
            assert model is not None
            model.pulls.append(self.clock.now_s + TICKET_S)

    @invariant()
    def what_is_listed_is_what_lives(self) -> None:
        for who in (ACME, RIVAL, OPERATOR):
            listed = [
                (peer.id, peer.incarnation, peer.draining, peer.num_pulls)
                for peer in self.directory.visible(who)
            ]
            expected = [
                (peer_id, model.incarnation, model.draining, self.num_pulls(model))
                for (owner, peer_id), model in self.models.items()
                if owner in (who.tenant, "*") and self.clock.now_s < model.ends_s
            ]
            assert sorted(listed) == sorted(expected)
            assert all(num_pulls <= MAX_PULLS for *_, num_pulls in listed)


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
