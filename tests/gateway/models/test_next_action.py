"""Tests of the version policy: examples, and properties over every sequence of events."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelport.gateway.models.next_action import (
    LoadVersion,
    UnloadVersion,
    VersionSnapshot,
    next_action,
    wanted,
)
from modelport.gateway.repository import config
from modelport.gateway.repository.version_policy import VersionPolicy

LATEST = VersionPolicy()
ALL = VersionPolicy(latest=None)


def specific(*versions: int) -> VersionPolicy:
    return VersionPolicy(specific=frozenset(versions))


def act(
    policy: VersionPolicy,
    available: Mapping[int, str],
    serving: Mapping[int, str] | None = None,
    failed: Mapping[int, str] | None = None,
) -> LoadVersion | UnloadVersion | None:
    return next_action(VersionSnapshot(policy, available, serving or {}, failed or {}))


# -- what a configuration says ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", LATEST),
        ("version_policy { }", LATEST),
        ("version_policy { latest { } }", LATEST),
        ("version_policy { latest { num_versions: 3 } }", VersionPolicy(latest=3)),
        ("version_policy { all { } }", ALL),
        ("version_policy { specific { versions: [ 1, 3 ] } }", specific(1, 3)),
    ],
)
def test_a_policy_is_read_from_the_configuration(text: str, policy: VersionPolicy) -> None:
    assert VersionPolicy.of(config.parse(text).version_policy) == policy


# -- sentences ------------------------------------------------------------------------------------


def test_with_nothing_on_disk_there_is_nothing_to_do() -> None:
    assert act(LATEST, {}) is None


def test_the_newest_version_is_loaded_first() -> None:
    assert act(LATEST, {1: "a", 2: "b"}) == LoadVersion(2)


def test_when_the_newest_serves_the_older_one_is_not_loaded() -> None:
    assert act(LATEST, {1: "a", 2: "b"}, {2: "b"}) is None


def test_a_new_version_is_loaded_while_the_old_one_still_serves() -> None:
    assert act(LATEST, {1: "a", 2: "b"}, {1: "a"}) == LoadVersion(2)


def test_the_old_version_is_unloaded_once_the_new_one_serves() -> None:
    assert act(LATEST, {1: "a", 2: "b"}, {1: "a", 2: "b"}) == UnloadVersion(1)


def test_when_the_newest_fails_the_next_older_one_is_loaded_in_its_place() -> None:
    assert act(LATEST, {1: "a", 2: "bad"}, failed={2: "bad"}) == LoadVersion(1)


def test_when_the_newest_fails_the_old_one_keeps_serving() -> None:
    assert act(LATEST, {1: "a", 2: "bad"}, {1: "a"}, {2: "bad"}) is None


def test_a_failed_version_is_tried_again_once_its_content_changes() -> None:
    assert act(LATEST, {1: "a", 2: "repaired"}, {1: "a"}, {2: "bad"}) == LoadVersion(2)


def test_a_version_whose_content_changes_is_loaded_again() -> None:
    assert act(LATEST, {1: "changed"}, {1: "a"}) == LoadVersion(1)


def test_a_reload_that_fails_leaves_the_version_serving() -> None:
    assert act(LATEST, {1: "bad"}, {1: "a"}, {1: "bad"}) is None


def test_a_version_that_fails_to_reload_is_not_replaced_by_an_older_one() -> None:
    assert act(LATEST, {1: "a", 2: "bad"}, {2: "b"}, {2: "bad"}) is None


def test_all_versions_are_loaded_newest_first() -> None:
    assert act(ALL, {1: "a", 2: "b", 3: "c"}) == LoadVersion(3)
    assert act(ALL, {1: "a", 2: "b", 3: "c"}, {3: "c"}) == LoadVersion(2)
    assert act(ALL, {1: "a", 2: "b", 3: "c"}, {3: "c", 2: "b", 1: "a"}) is None


def test_one_failure_of_all_does_not_stop_the_others() -> None:
    assert act(ALL, {1: "a", 2: "bad"}, failed={2: "bad"}) == LoadVersion(1)


def test_the_latest_two_are_two() -> None:
    available = {1: "a", 2: "b", 3: "c"}
    assert act(VersionPolicy(latest=2), available, {3: "c"}) == LoadVersion(2)
    assert act(VersionPolicy(latest=2), available, {3: "c", 2: "b"}) is None


def test_only_specific_versions_are_loaded() -> None:
    assert act(specific(1), {1: "a", 2: "b"}) == LoadVersion(1)
    assert act(specific(1), {1: "a", 2: "b"}, {1: "a"}) is None


def test_a_specific_version_that_fails_is_not_replaced_by_another() -> None:
    assert act(specific(2), {1: "a", 2: "bad"}, failed={2: "bad"}) is None


def test_a_version_taken_from_disk_is_unloaded_while_another_serves() -> None:
    assert act(LATEST, {2: "b"}, {1: "a", 2: "b"}) == UnloadVersion(1)


def test_when_every_version_vanishes_what_serves_keeps_serving() -> None:
    assert act(LATEST, {}, {1: "a", 2: "b"}) is None


@pytest.mark.parametrize("policy", [LATEST, ALL, specific(2)])
def test_the_last_version_keeps_serving_while_its_replacement_does_not_load(
    policy: VersionPolicy,
) -> None:
    """Version 1 is gone from disk, version 2 is bad: a bad release takes no model down."""
    assert act(policy, {2: "bad"}, {1: "a"}, {2: "bad"}) is None


def test_narrowing_the_policy_to_a_bad_version_takes_no_model_down() -> None:
    assert act(specific(2), {1: "a", 2: "bad"}, {1: "a"}, {2: "bad"}) is None


# -- sentences, where room is to be made -----------------------------------------------------------


def make_room(
    policy: VersionPolicy,
    available: Mapping[int, str],
    serving: Mapping[int, str] | None = None,
    failed: Mapping[int, str] | None = None,
    displaced: Collection[int] = (),
) -> LoadVersion | UnloadVersion | None:
    return next_action(
        VersionSnapshot(policy, available, serving or {}, failed or {}, True, frozenset(displaced))
    )


def test_the_old_version_makes_room_before_the_new_one_is_loaded() -> None:
    assert make_room(LATEST, {1: "a", 2: "b"}, {1: "a"}) == UnloadVersion(1)
    assert make_room(LATEST, {1: "a", 2: "b"}, displaced=[1]) == LoadVersion(2)


def test_the_old_content_makes_room_before_the_new_one_is_loaded() -> None:
    assert make_room(LATEST, {1: "changed"}, {1: "a"}) == UnloadVersion(1)
    assert make_room(LATEST, {1: "changed"}, displaced=[1]) == LoadVersion(1)


def test_everything_unwanted_makes_room_and_nothing_else() -> None:
    available = {1: "a", 2: "b", 3: "c"}
    assert make_room(specific(2, 3), available, {1: "a", 2: "b"}) == UnloadVersion(1)
    assert make_room(specific(2, 3), available, {2: "b"}, displaced=[1]) == LoadVersion(3)


def test_where_all_are_wanted_none_makes_room() -> None:
    assert make_room(ALL, {1: "a", 2: "b"}, {1: "a"}) == LoadVersion(2)


def test_nothing_makes_room_for_a_version_that_is_known_not_to_load() -> None:
    assert make_room(LATEST, {1: "a", 2: "bad"}, {1: "a"}, {2: "bad"}) is None
    assert make_room(specific(2), {1: "a", 2: "bad"}, {1: "a"}, {2: "bad"}) is None


def test_what_made_room_comes_back_where_the_new_one_does_not_load() -> None:
    assert make_room(LATEST, {1: "a", 2: "bad"}, {}, {2: "bad"}, [1]) == LoadVersion(1)


def test_what_made_room_comes_back_even_where_the_policy_does_not_want_it() -> None:
    assert make_room(specific(2), {1: "a", 2: "bad"}, {}, {2: "bad"}, [1]) == LoadVersion(1)
    assert make_room(specific(2), {1: "a", 2: "bad"}, {1: "a"}, {2: "bad"}, [1]) is None


def test_what_made_room_and_is_gone_from_disk_cannot_come_back() -> None:
    assert make_room(specific(2), {2: "bad"}, {}, {2: "bad"}, [1]) is None


# -- properties -----------------------------------------------------------------------------------

_versions = st.integers(1, 5)
_content = st.sampled_from("abc")
_policies = st.one_of(
    st.just(ALL),
    st.integers(1, 4).map(lambda n: VersionPolicy(latest=n)),
    st.frozensets(_versions, min_size=1).map(lambda v: VersionPolicy(specific=v)),
)


def worlds(making_room: st.SearchStrategy[bool]) -> st.SearchStrategy[VersionSnapshot]:
    contents = st.dictionaries(_versions, _content)
    return st.builds(VersionSnapshot, _policies, contents, contents, contents, making_room)


_worlds = worlds(st.just(False))
_either = worlds(st.booleans())
_making_room = worlds(st.just(True))
#: Which content loads and which does not.
_loads = st.dictionaries(st.tuples(_versions, _content), st.booleans())


Steps = list[tuple[LoadVersion | UnloadVersion, VersionSnapshot]]


def run(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> tuple[Steps, VersionSnapshot]:
    """Every action with the snapshot it was decided on, and where it ends."""
    steps: Steps = []
    for _ in range(1 + 4 * 5):
        action = next_action(world)
        if action is None:
            return steps, world
        steps.append((action, world))
        serving, failed = dict(world.serving), dict(world.failed)
        displaced = set(world.displaced)
        if isinstance(action, UnloadVersion):
            del serving[action.version]
            displaced |= {action.version} if world.resource_preserving else set()
        else:
            content = world.available[action.version]
            if loads.get((action.version, str(content)), True):
                serving[action.version] = content
                failed.pop(action.version, None)
            else:
                failed[action.version] = content
        world = world._replace(serving=serving, failed=failed, displaced=displaced)
    raise AssertionError(f"no end after {len(steps)} actions: {[a for a, _ in steps]}")


@given(_either, _loads)
def test_it_always_comes_to_an_end(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> None:
    steps, end = run(world, loads)
    assert len(steps) <= 3 * len(world.available) + len(world.serving)
    assert next_action(end) is None


@given(_worlds, _loads)
def test_nothing_is_unloaded_while_something_wanted_has_still_to_be_loaded(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> None:
    for action, seen in run(world, loads)[0]:
        if isinstance(action, UnloadVersion):
            assert action.version not in wanted(seen)
            for version in wanted(seen):
                current = seen.serving.get(version) == seen.available[version]
                known_bad = seen.failed.get(version) == seen.available[version]
                assert current or known_bad, f"{action} before version {version} was tried"


@given(_worlds, _loads)
def test_the_last_version_that_serves_is_never_taken_away(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> None:
    for action, seen in run(world, loads)[0]:
        if isinstance(action, UnloadVersion):
            assert len(seen.serving) > 1, f"{action} leaves nothing that serves: {seen}"


@given(_worlds, _loads)
def test_where_availability_is_preserved_something_serves_at_every_step(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> None:
    steps, end = run(world, loads)
    first = next((n for n, (_, seen) in enumerate(steps) if seen.serving), len(steps))
    for _, seen in steps[first:]:
        assert seen.serving
    assert end.serving or not world.serving


@given(_making_room, _loads)
def test_where_room_is_made_nothing_is_loaded_beside_what_is_not_wanted(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> None:
    for action, seen in run(world, loads)[0]:
        if isinstance(action, LoadVersion):
            assert action.version not in seen.serving
            kept = {*wanted(seen), *seen.held}
            assert set(seen.serving) <= kept, f"{action} beside {seen.serving}"


@given(_making_room, _loads)
def test_where_room_is_made_something_serves_in_the_end_if_anything_can(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> None:
    _, end = run(world._replace(failed={}), loads)
    candidates = {v for v in world.serving if v in world.available} | set(wanted(end))
    loadable = [v for v in candidates if loads.get((v, str(world.available[v])), True)]
    assert end.serving or not loadable


@given(_either, _loads)
def test_a_version_is_loaded_at_most_once_for_the_same_content(
    world: VersionSnapshot, loads: Mapping[tuple[int, str], bool]
) -> None:
    loaded = [action for action, _ in run(world, loads)[0] if isinstance(action, LoadVersion)]
    assert len(loaded) == len(set(loaded))


@given(_either)
def test_when_everything_loads_exactly_what_the_policy_wants_serves_in_the_end(
    world: VersionSnapshot,
) -> None:
    fresh = world._replace(failed={})
    _, end = run(fresh, {})
    if target := wanted(fresh):
        kept = {v: fresh.serving[v] for v in fresh.serving if v in fresh.held}
        assert end.serving == kept | {version: fresh.available[version] for version in target}
