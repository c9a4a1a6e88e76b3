"""What is taken for lost while nothing finishes, with machines and a clock of the test's own."""

from __future__ import annotations

from cluster.machines import Machines
from cluster.resources import TaskResources
from cluster.silence import Seen, Silence

RESOURCES = {"write": TaskResources(num_cpus=1)}
SILENCE_SECONDS = 10.0


class Cluster:
    """Machines with a core each, and the time."""

    def __init__(self, *names: str) -> None:
        self.seconds = 0.0
        self.live = set(names)
        self.gone: set[str] = set()
        self.silence = Silence(SILENCE_SECONDS, machines=self.machines, clock=lambda: self.seconds)

    def machines(self) -> Machines:
        return Machines({name: {"CPU": 1.0} for name in sorted(self.live)}, frozenset(self.gone))

    def lose(self, name: str) -> None:
        self.live.remove(name)
        self.gone.add(name)

    def look(self, *in_flight: str) -> Seen:
        """Look after another silence."""
        self.seconds += SILENCE_SECONDS
        assert self.silence.is_due()
        return self.silence.look(in_flight, RESOURCES)


def test_a_slow_task_is_not_suspected_while_all_machines_live() -> None:
    cluster = Cluster("a", "b")
    cluster.silence.begin()
    assert [cluster.look("slow") for _ in range(9)] == [Seen(has_machine_gone=False)] * 9


def test_what_was_in_flight_when_a_machine_went_is_lost_after_three_silences() -> None:
    cluster = Cluster("a", "b")
    cluster.silence.begin()
    cluster.lose("b")
    assert cluster.look("1", "2") == Seen(has_machine_gone=True)
    assert cluster.look("1", "2") == Seen(has_machine_gone=False)
    assert cluster.look("1", "2", "later") == Seen(has_machine_gone=False, lost=("1", "2"))
    assert [cluster.look("1", "2", "later").lost for _ in range(9)] == [()] * 9, "lost a second time"


def test_a_finished_task_puts_the_time_off() -> None:
    cluster = Cluster("a", "b")
    cluster.silence.begin()
    cluster.lose("b")
    cluster.look("1", "2")
    cluster.silence.sign()
    assert not cluster.silence.is_due()
    assert [cluster.look("2").lost for _ in range(3)] == [(), (), ("2",)]


def test_nothing_is_begun_again_while_nothing_can_run() -> None:
    cluster = Cluster("a")
    cluster.silence.begin()
    cluster.lose("a")
    for _ in range(5):
        seen = cluster.look("1")
        assert seen.shortages
        assert seen.lost == ()
    cluster.live.add("c")
    assert cluster.look("1") == Seen(has_machine_gone=False, lost=("1",))


def test_a_machine_that_came_and_went_between_two_looks_counts() -> None:
    cluster = Cluster("a")
    cluster.silence.begin()
    cluster.gone.add("b")
    assert cluster.look("1").has_machine_gone


def test_a_machine_that_went_while_all_went_well_is_told_when_the_next_run_begins() -> None:
    cluster = Cluster("a", "b")
    assert not cluster.silence.begin()
    cluster.lose("b")
    assert cluster.silence.begin(), "what Ray asked it may still be open"
    assert not cluster.silence.begin()
    assert cluster.look("1") == Seen(has_machine_gone=False)


def test_machines_that_were_gone_before_the_first_run_do_not_matter() -> None:
    cluster = Cluster("a", "b")
    cluster.lose("b")
    assert not cluster.silence.begin()
    assert [cluster.look("1") for _ in range(4)] == [Seen(has_machine_gone=False)] * 4
